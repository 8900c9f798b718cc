"""Tables kept from topics, SQL over them, and standing queries."""
