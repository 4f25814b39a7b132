#!/usr/bin/env python3
"""Posts events to Slack, except notices, for --on-event:

SLACK_WEBHOOK=https://hooks.slack.com/services/... ddp-launch --on-event "python examples/events/slack.py" train.py
"""

import json
import os
import sys
import urllib.request

event = json.load(sys.stdin)
if event["event"] == "notice":
    sys.exit(0)
text = f"*{event['job']}* {event['event']} (generation {event['generation']}): {event['text']}"
message = json.dumps({"text": text}).encode()
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(os.environ["SLACK_WEBHOOK"], message, headers)
urllib.request.urlopen(request, timeout=20).read()
