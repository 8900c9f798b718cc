"""What every client of a cluster needs: properties, credentials, errors in words, rights, reachability."""
