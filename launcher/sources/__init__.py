"""Health of this node as other tools report it: node-problem-detector, NVSentinel, the DCGM exporter, or a script.

A source (`--health-source`) is asked before the node joins, and every 30 s while ranks run. What it says becomes
findings; an unfit node does not join. A source that fails never stops a job: the user gets one warning.

    launcher.sources.findings      recognizes the format of an answer, and turns it into findings. Without I/O.
    launcher.sources.findings  findings from conditions, taints and labels of a Kubernetes node. Without I/O.
    launcher.sources.findings     findings from metrics in Prometheus text format. Without I/O.
    launcher.sources.source      asks a URL, a file or the Kubernetes API
    launcher.sources.source        asks the sources at intervals, in a thread of its own
"""
