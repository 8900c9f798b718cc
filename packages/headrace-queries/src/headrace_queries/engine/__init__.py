"""The process that keeps tables and runs statements over them."""
