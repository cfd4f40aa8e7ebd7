"""GPU and CPU kernels, with a torch reference for each and the choice between them."""
