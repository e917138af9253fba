"""`hearth bench load --arrivals poisson`: requests that come when they come, beside an ideal."""
