"""Each rank serves a model over HTTP and is asked by itself; no process group is formed."""

import http.server
import json
import os
import threading
import urllib.request

import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1).eval()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with torch.inference_mode():
            body = json.dumps(model(torch.tensor(asked)).tolist()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever).start()
for number in range(20):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.server_port}", json.dumps([1.0, 2.0, number]).encode()
    )
    with urllib.request.urlopen(request) as answer:
        print(os.environ["RANK"], answer.read().decode())
server.shutdown()
