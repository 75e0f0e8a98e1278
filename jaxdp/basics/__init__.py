"""Tools for all packages of jaxdp."""
