"""Every argument check on shapes, dtypes and ranges, and every error sentence, once for all backends.

Checks take arrays of any framework and look only at `.shape` and `.dtype`. Values are looked at through
`values(x)`, which the backend passes in: it gives a NumPy array, or None where looking is impossible
(traced) or would wait for a device. What is then not checked is listed in docs/spec.md.
"""
