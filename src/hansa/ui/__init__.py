"""The live page: what runs, as it runs, in a browser. It knows neither the simulation nor the network: whoever has
something to show hands it over as plain values (`events.Source`), and what may be started or stopped goes through a
`page.Control`."""
