"""A federation of many machines: keys and certificates, the server, the clients, and runs on them."""
