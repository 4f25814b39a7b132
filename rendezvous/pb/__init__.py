"""The generated messages. Their compiler is as old as the oldest protobuf that we run with (proto/generate.sh).

Some releases of protobuf 6 warn about code of a compiler of version 5, which they and protobuf 7 run all the same.
"""

import warnings

warnings.filterwarnings("ignore", r"Protobuf gencode version 5\S+ is exactly one major .* at rendezvous/", UserWarning)
