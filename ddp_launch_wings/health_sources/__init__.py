"""Health of this node as other tools report it: Kubernetes, NVSentinel, node-problem-detector, DCGM, or a script.

findings    recognizes the format of an answer, and turns it into findings. Without I/O.
source      asks a URL, a file or the Kubernetes API
"""
