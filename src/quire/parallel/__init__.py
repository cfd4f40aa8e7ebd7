"""Communication between devices: groups of ranks and their collectives."""
