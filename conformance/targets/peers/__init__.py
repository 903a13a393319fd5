"""Attention that others wrote, as targets: one small adapter each, which offers what its original can be asked for.

An adapter has `attention` with the arguments that the original has, and raises NotOffered for a combination that it
documents as its own. It adds no arithmetic: reordering axes and naming arguments is all it does.
"""

# Name on the command line: module in this folder.
PEERS: dict[str, str] = {}
