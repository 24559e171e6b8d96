"""Transport: HTTPS listener and client, admission, wire format, keys and signatures, limits."""
