"""Planning before a device is rented: what a model needs, where it fits, how fast it can be."""
