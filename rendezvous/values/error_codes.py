"""The codes of errors: every error that a person sees ends with one, for example [DDP-1001].

A code keeps its number and its meaning in all releases: people search for it, programs compare it. A code that is no
longer used stays in this table. `docs/errors.md` has a section for each code, which `ddpctl explain` prints. `ddp`
imports nothing of this package: its exceptions name their codes as text, and a test compares them with this table.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    # 1: the command line, variables and files of options
    UNKNOWN_OPTION = "DDP-1001"
    AMBIGUOUS_OPTION = "DDP-1002"
    MISSING_VALUE = "DDP-1003"
    INVALID_VALUE = "DDP-1004"
    CONTRADICTING_OPTIONS = "DDP-1005"
    INVALID_COMMAND_LINE = "DDP-1006"
    MISSING_SCRIPT = "DDP-1007"
    SCRIPT_NOT_FOUND = "DDP-1008"
    NOT_A_SCRIPT = "DDP-1009"
    MODULE_NOT_FOUND = "DDP-1010"
    PROGRAM_NOT_RUNNABLE = "DDP-1011"
    CONFIG_FILE_INVALID = "DDP-1012"
    FILE_UNREADABLE = "DDP-1013"
    FOLDER_UNUSABLE = "DDP-1014"
    PORT_IN_USE = "DDP-1015"
    CANNOT_WRITE_OUTPUT = "DDP-1016"
    UNSUPPORTED_SYSTEM = "DDP-1017"
    MANUAL_PAGE_UNKNOWN = "DDP-1018"
    PACKAGE_MISSING = "DDP-1019"
    JOB_FILE_INVALID = "DDP-1020"
    CANNOT_SUBMIT = "DDP-1021"
    UNKNOWN_CODE = "DDP-1022"
    JOURNAL_UNREADABLE = "DDP-1023"
    DECISIONS_DIFFER = "DDP-1024"
    # 2: joining the rendezvous, and calls to the service
    NO_RENDEZVOUS_ADDRESS = "DDP-2001"
    SERVICE_UNREACHABLE = "DDP-2002"
    ADDRESS_UNUSABLE = "DDP-2003"
    CLIENT_SETTINGS_INVALID = "DDP-2004"
    SECRET_UNUSABLE = "DDP-2005"
    NOT_AUTHENTICATED = "DDP-2006"
    NOT_PERMITTED = "DDP-2007"
    TLS_FAILED = "DDP-2008"
    REJECTED = "DDP-2009"
    NODES_DISAGREE = "DDP-2010"
    JOB_HAS_ENDED = "DDP-2011"
    NOT_SUPPORTED_BY_SERVICE = "DDP-2012"
    NO_SUCH_JOB = "DDP-2013"
    NOT_FOUND = "DDP-2014"
    NOT_POSSIBLE_NOW = "DDP-2015"
    LIMIT_REACHED = "DDP-2016"
    REQUEST_INVALID = "DDP-2017"
    SERVICE_FAILED = "DDP-2018"
    COULD_NOT_START_TOGETHER = "DDP-2019"
    # 3: running the service
    SERVICE_SETTING_INVALID = "DDP-3001"
    CANNOT_LISTEN = "DDP-3002"
    SERVICE_UNPROTECTED = "DDP-3003"
    STORE_URL_INVALID = "DDP-3004"
    STORE_UNUSABLE = "DDP-3005"
    KEY_FILE_UNUSABLE = "DDP-3006"
    # 4: starting ranks on a node
    NO_DEVICES = "DDP-4001"
    TOO_FEW_OPEN_FILES = "DDP-4002"
    CANNOT_BIND_RANKS = "DDP-4003"
    PREFLIGHT_FAILED = "DDP-4004"
    CANNOT_START_RANKS = "DDP-4005"
    NO_WARM_TEMPLATE = "DDP-4006"
    HOST_FAILED = "DDP-4007"
    CANNOT_PROFILE = "DDP-4008"
    CANNOT_REHEARSE = "DDP-4009"
    # 5: why a job failed
    RANK_OUT_OF_MEMORY = "DDP-5001"
    RANK_HARDWARE = "DDP-5002"
    RANK_NETWORK = "DDP-5003"
    RANK_EXCEPTION = "DDP-5004"
    RANK_SIGNAL = "DDP-5005"
    RANK_EXIT_CODE = "DDP-5006"
    RANK_HANG = "DDP-5007"
    NODE_LOST = "DDP-5008"
    ONLY_CONSEQUENCES = "DDP-5009"
    ENDED_ON_REQUEST = "DDP-5010"
    JOB_FAILED = "DDP-5011"
    # 6: ddp.launch
    LAUNCH_ARGUMENT_INVALID = "DDP-6001"
    CANNOT_PICKLE = "DDP-6002"
    RESULT_UNREADABLE = "DDP-6003"
    # 7: the library ddp: groups and gradients
    COMMUNICATION_FAILED = "DDP-7001"
    CANNOT_FORM_GROUP = "DDP-7002"
    COMMUNICATES_BEFORE_RUN = "DDP-7003"
    CANNOT_REFORM = "DDP-7004"
    NUMBERS_NOT_FINITE = "DDP-7005"
    WRONG_ARGUMENT = "DDP-7006"
    WRONG_USE = "DDP-7007"
    # 8: the library ddp: elastic state and checkpoints
    CHECKPOINT_UNREADABLE = "DDP-8001"
    COMMIT_FAILED = "DDP-8002"
    NO_SPACE_FOR_COMMITS = "DDP-8003"
    COMMIT_DAMAGED = "DDP-8004"
    COMMIT_REJECTED = "DDP-8005"

    @property
    def phrase(self) -> str:
        """Its name as text: "unknown option"."""
        return self.name.lower().replace("_", " ")


class Coded(Exception):
    """An error for a person: a text and a code. A class sets the usual code, and a raise may give another."""

    code: Code

    def __init__(self, *args: object, code: Code | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


def with_code(text: str, code: str) -> str:
    """The text of an error as it is printed: the code comes last, after what to do."""
    return f"{text.rstrip()} [{code}]"
