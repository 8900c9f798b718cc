"""Dead letters: read in pages, counted, their origin proved, and which of them are completed."""
