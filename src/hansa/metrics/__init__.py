"""Names and directions of metrics, measures of a run, statistics over seeds."""
