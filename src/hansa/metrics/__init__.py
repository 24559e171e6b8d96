"""What is measured: names and directions of metrics, measures of a run, statistics over seeds."""
