#!/usr/bin/env python3
"""Opens an incident in PagerDuty when a job fails, and closes it when the job runs again, for --on-event:

PAGERDUTY_KEY=... ddp-launch --on-event "python examples/events/pagerduty.py" train.py
"""

import json
import os
import sys
import urllib.request

event = json.load(sys.stdin)
failed = event["event"] == "stopping" or (event["event"] == "ended" and not event["succeeded"])
runs = event["event"] == "restarted" or (event["event"] == "ended" and event["succeeded"])
if not (failed or runs):
    sys.exit(0)
alert = {
    "routing_key": os.environ["PAGERDUTY_KEY"],
    "event_action": "trigger" if failed else "resolve",
    "dedup_key": event["job"],
    "payload": {
        "summary": f"{event['job']}: {event['text']}"[:1024],
        "source": event["node"],
        "severity": "critical" if event["event"] == "ended" else "warning",
        "custom_details": event,
    },
}
url = os.environ.get("PAGERDUTY_URL", "https://events.pagerduty.com/v2/enqueue")
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(url, json.dumps(alert).encode(), headers)
urllib.request.urlopen(request, timeout=20).read()
