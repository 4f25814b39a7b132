#!/usr/bin/env python3
"""Sends a mail when a job ends or restarts, for --on-event:

MAIL_TO=me@example.org SMTP_HOST=mail.example.org ddp-launch --on-event "python examples/events/mail.py" train.py
"""

import json
import os
import smtplib
import sys
from email.message import EmailMessage

event = json.load(sys.stdin)
if event["event"] not in ("stopping", "ended", "left"):
    sys.exit(0)
mail = EmailMessage()
mail["From"] = os.environ.get("MAIL_FROM", os.environ["MAIL_TO"])
mail["To"] = os.environ["MAIL_TO"]
mail["Subject"] = f"{event['job']}: {event['event']}"
cause = event.get("cause") or {}
mail.set_content("\n\n".join(filter(None, (event["text"], cause.get("hint"), cause.get("traceback")))))
with smtplib.SMTP(
    os.environ.get("SMTP_HOST", "localhost"), int(os.environ.get("SMTP_PORT", "25")), timeout=20
) as server:
    server.send_message(mail)
