"""Reading compiled HLO programs."""
