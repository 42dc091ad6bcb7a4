"""Who may reach the API, and how: connections, certificates, keys, other origins, and clients that take nothing."""
