"""Who is let in, and by what: certificates, codes, limits for strangers, a file of what was done."""
