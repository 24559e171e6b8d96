"""Transport: HTTPS listener and client, admission, wire format, keys, certificates, signatures, limits."""
