"""Other products' configurations and endpoints, for people who come from them."""
