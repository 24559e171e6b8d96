"""The live page: a running simulation or aggregator, shown in a browser.

The page imports neither the simulation nor the network. A source hands over its content as plain values
(`events.Source`); runs and jobs are started and stopped through a `page.Control`.
"""
