"""Codes 1: the command line, variables and files of options."""

from __future__ import annotations

from rendezvous.explained.entry import Entry
from rendezvous.values.error_codes import Code

_PATH = "Check the path, and the folder in which you run the command."

ENTRIES = (
    Entry(
        Code.UNKNOWN_OPTION,
        "The command has no option with this name, or a file of options has an unknown key.",
        ("The name has a typing error.", "An option of the script stands before the script."),
        (
            "Use the name that the message suggests, or look it up with `ddp-launch --help all`.",
            "Put options of the script after its name: `ddp-launch --nproc-per-node 2 train.py --lr 0.1`.",
        ),
        "ddp-launch: error: unknown option --lr. Put options of the script after train.py.",
        "options",
    ),
    Entry(
        Code.AMBIGUOUS_OPTION,
        "An abbreviated option matches several options.",
        ("Options may be abbreviated as long as only one matches.",),
        ("Use the full name of the option.",),
        "ddp-launch: error: ambiguous option --n: it matches --nnodes, --node-rank. Use the full name.",
        "options",
    ),
    Entry(
        Code.MISSING_VALUE,
        "An option needs a value, and none was given.",
        (
            "The option is the last word.",
            "The next word starts with a dash, so it is read as another option.",
        ),
        ("Give the value. If it starts with a dash, write for example `--log-prefix=-x`.",),
        "ddp-launch: error: missing value for --nnodes. Run ddp-launch --help all to see what it accepts.",
        "options",
    ),
    Entry(
        Code.INVALID_VALUE,
        "An option, a variable or a key of a file has a value that it does not accept.",
        (
            "The value has another form than the option expects, or is out of range.",
            "A variable such as DDP_LAUNCH_NNODES or PET_NNODES is still set from an earlier command.",
        ),
        (
            "Use a value as in the example of the message.",
            "If you did not give the value, run `ddp-launch --print-config`: it shows where each value is from.",
        ),
        "ddp-launch: error: invalid --nnodes '3:1': MIN is larger than MAX. Use N or MIN:MAX, for example --nnodes 1:3",
        "options",
    ),
    Entry(
        Code.CONTRADICTING_OPTIONS,
        "Two options cannot be used together.",
        (
            "Both options decide the same thing.",
            "One of them may come from a variable or from the file of --config.",
        ),
        ("Remove one of the two. `ddp-launch --print-config` shows where each is from.",),
        "ddp-launch: error: invalid --nnodes '2': contradicts --standalone, which runs the job on one node. "
        "Use either --nnodes or --standalone.",
        "options",
    ),
    Entry(
        Code.INVALID_COMMAND_LINE,
        "The words of the command do not fit its syntax.",
        ("A command or an argument is missing, unknown, or has a wrong form.",),
        ("Run the command with --help. It shows the commands, or the arguments of one command.",),
        "ddpctl: error: the following arguments are required: COMMAND",
        "ddpctl",
    ),
    Entry(
        Code.MISSING_SCRIPT,
        "The command does not name a script.",
        ("All words were read as options and their values.",),
        ("Name the script after the options: `ddp-launch [options] script.py [args ...]`.",),
        "ddp-launch: error: missing script. Use ddp-launch [options] script.py [args ...].",
        "options",
    ),
    Entry(
        Code.SCRIPT_NOT_FOUND,
        "The script does not exist, or cannot be read.",
        ("The path is wrong, or relative to another folder.", "Another machine does not have the file."),
        (_PATH, "With several nodes, put the script at the same path on each of them."),
        "ddp-launch: error: script trian.py does not exist. Did you mean train.py?",
    ),
    Entry(
        Code.NOT_A_SCRIPT,
        "The file is not a Python script that can run.",
        ("It has a syntax error.", "It is a binary file, a shell script, a folder, or standard input."),
        (
            "Correct the line that the message names.",
            "To start a program that is not Python, use --no-python. To start a module, use -m.",
        ),
        "ddp-launch: error: train.py: line 3: '(' was never closed. Fix the syntax error.",
    ),
    Entry(
        Code.MODULE_NOT_FOUND,
        "The module of -m cannot be run.",
        (
            "It is not in the current folder and not installed for this Python interpreter.",
            "It is a package without `__main__.py`, or the path of a file.",
        ),
        (
            "Run the command in the folder that contains the package, or install the package.",
            "Write a.b.train, not a/b/train.py.",
        ),
        "ddp-launch: error: invalid -m 'tain': module tain is not in the current directory. Did you mean train?",
    ),
    Entry(
        Code.PROGRAM_NOT_RUNNABLE,
        "The program of --no-python, or the interpreter of PYTHON_EXEC, cannot be run.",
        ("It is not on PATH.", "The file is not executable."),
        ("Give its path.", "Make it executable: `chmod +x FILE`."),
        "ddp-launch: error: invalid --no-python 'trainer': the program is not on PATH.",
    ),
    Entry(
        Code.CONFIG_FILE_INVALID,
        "The file of --config has a mistake.",
        ("It is not valid TOML, or not UTF-8.", "A key is given twice, or has a value of a wrong type."),
        ("Correct the line that the message names. The keys are the long flags without the dashes.",),
        "ddp-launch: error: job.toml is not valid TOML: Expected '=' after a key (at line 1, column 9).",
        "options",
    ),
    Entry(
        Code.FILE_UNREADABLE,
        "A file that an option or argument names cannot be read, or has other contents than expected.",
        ("The file does not exist, or you may not read it.", "It was written by another program or release."),
        ("Check the path and the permissions of the file.",),
        "ddpctl: --file: cannot read logs/failure.json: No such file or directory",
    ),
    Entry(
        Code.FOLDER_UNUSABLE,
        "A folder cannot be used: for logs, for temporary files, or as the current folder.",
        ("It does not exist and cannot be created.", "You may not write to it, or the disk is full."),
        ("Name another folder with --log-dir, or with TMPDIR for temporary files.",),
        "ddp-launch: error: invalid --log-dir '/proc/logs': cannot create the directory (No such file or directory). "
        "Use another directory.",
        "logs",
    ),
    Entry(
        Code.PORT_IN_USE,
        "A port that an option names cannot be used.",
        ("Another process listens on it.", "Only root may use ports below 1024."),
        ("Omit the option: then a free port is used.", "Find the other process with `ss -ltnp`."),
        "ddp-launch: error: invalid --master-port '29500': the port is in use. "
        "Remove the option to use any free port.",
    ),
    Entry(
        Code.CANNOT_WRITE_OUTPUT,
        "The command cannot write to its standard output.",
        ("The disk of the file to which the output goes is full.",),
        ("Free some space, or write to another file.",),
        "ddpctl: cannot write to standard output: No space left on device",
    ),
    Entry(
        Code.UNSUPPORTED_SYSTEM,
        "ddp-launch does not run on this system or with this Python interpreter.",
        ("The system is not Linux.", "The interpreter is a free-threaded build of Python."),
        ("Use Linux, and a Python with the global interpreter lock, for example python3.13.",),
        "ddp-launch: error: ddp-launch runs on Linux only, and this system is darwin.",
        "install",
    ),
    Entry(
        Code.MANUAL_PAGE_UNKNOWN,
        "The manual has no such page, or is not installed.",
        ("The name of the page has a typing error.", "The installation is incomplete."),
        ("Run `ddp-launch docs` for the list of pages.",),
        "ddp-launch: error: the manual has no page hang. Did you mean hangs?",
    ),
    Entry(
        Code.PACKAGE_MISSING,
        "A Python package that this feature needs is not installed, or is too old.",
        ("The feature is optional, and its packages are installed on demand.",),
        ("Install the package with the command that the message names.",),
        "ddp-launch: error: invalid --debug '1:5678': debugpy is not installed, and editors need it.",
        "install",
    ),
    Entry(
        Code.JOB_FILE_INVALID,
        "The job file of `ddpctl submit` has a mistake.",
        (
            "It does not exist, or is not valid TOML.",
            "A key is unknown or missing, or its value does not fit.",
        ),
        ("Correct the key that the message names. `ddpctl submit --dry-run` checks the file.",),
        "ddpctl: job.toml: [job]: missing: script",
        "deploy",
    ),
    Entry(
        Code.CANNOT_SUBMIT,
        "The job cannot be handed to Kubernetes, Slurm or ssh.",
        ("kubectl, sbatch or ssh is not on PATH, or ended with an error.",),
        (
            "Read the message of that program.",
            "Use --dry-run, and submit the output on a machine that has the program.",
        ),
        "ddpctl: sbatch is not on PATH. Install it, or use --dry-run and submit the output elsewhere.",
        "deploy",
    ),
    Entry(
        Code.UNKNOWN_CODE,
        "`ddpctl explain` does not know this error code.",
        ("The code has a typing error.", "The message is from a newer release."),
        (
            "Run `ddpctl explain` for the list of codes.",
            "Use the ddpctl of the release that printed the message.",
        ),
        "ddpctl: DDP-9999 is not an error code. Run `ddpctl explain` for the list.",
    ),
    Entry(
        Code.JOURNAL_UNREADABLE,
        "`ddpctl replay` cannot read a journal, or not all of it.",
        (
            "The file is not a journal.",
            "It was cut or damaged when it was copied.",
            "A newer release wrote it.",
        ),
        (
            "Copy the file again, in binary mode.",
            "Use the release that the message names, or a later one.",
        ),
        "ddpctl: job.ddpj is not a journal: it begins with b'{\"a\": 1}'. Journals have names that end in .ddpj",
        "replay",
    ),
    Entry(
        Code.DECISIONS_DIFFER,
        "A replay made other decisions than the journal contains.",
        (
            "Another release wrote the journal, and its rules were different.",
            "The rules depend on something that journals do not contain, which is a bug.",
        ),
        (
            "Replay the journal with the release that wrote it; `ddpctl replay` prints which one that is.",
            "If the releases are equal, report the bug and attach the journal.",
        ),
        "ddpctl: 1 of 34 decisions differ from the recorded ones, first at step 17. Replay the journal with the "
        "release that wrote it",
        "replay",
    ),
)
