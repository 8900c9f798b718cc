"""`headrace plan`: what a configuration needs at given rates."""
