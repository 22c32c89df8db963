"""A small set of tasks that need nothing but the programs of a Unix system: files, text, archives, git.

No checker runs anything that the agent has made or could have changed; where a script of the agent's is to be
judged, it runs before, apart, and the checker looks at what came of it (`TerminalTask.run`).
"""

from __future__ import annotations

import functools
import random
import shutil
from collections import Counter

import numpy as np

from gymllm_envs.terminal.task import RunStep, TerminalTask

_WORDS = ("sea", "ship", "whale", "Whale", "whales", "captain", "harpoon", "storm", "mast", "the")
# The same in every episode, so that what comes of it can be known here.
_RNG = random.Random(7)
_BOOK = "\n".join(
    " ".join(_RNG.choice(_WORDS) + _RNG.choice(("", "", "", ",", ".")) for _ in range(11))
    for _ in range(240)
)
_WHALES = sum(
    word.strip(",.").lower() == "whale" for line in _BOOK.split("\n") for word in line.split()
)
_ADDRESSES = [f"10.0.{_RNG.randrange(3)}.{_RNG.randrange(1, 9)}" for _ in range(400)]
_LOG = "".join(
    f'{address} - - [03/Mar/2024:10:{n // 60:02}:{n % 60:02} +0000] "GET /{_RNG.choice("abc")} HTTP/1.1" '
    f"{_RNG.choice((200, 200, 200, 404, 500))} {_RNG.randrange(90, 9000)}\n"
    for n, address in enumerate(_ADDRESSES)
)
_TOP = "".join(
    f"{address} {count}\n"
    for address, count in sorted(Counter(_ADDRESSES).items(), key=lambda row: (-row[1], row[0]))[:5]
)
_PEOPLE = [
    f"{number},{name},{_RNG.randrange(18, 90)}"
    for number, name in enumerate(("Ada", "Bo", "Cy", "Di", "Eve", "Flo", "Gus", "Hal"), 3)
]
_MIXED = [*_PEOPLE, *_RNG.sample(_PEOPLE, 5)]
_RNG.shuffle(_MIXED)
_CSV = "\n".join(["id,name,age", *_MIXED]) + "\n"
_SORTED = "\n".join(["id,name,age", *_PEOPLE]) + "\n"

_GIT = (
    "export GIT_AUTHOR_NAME=A GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=A "
    "GIT_COMMITTER_EMAIL=a@example.org GIT_AUTHOR_DATE=2024-01-01T00:00:00Z "
    "GIT_COMMITTER_DATE=2024-01-01T00:00:00Z; git init -q -b main .; "
)
# A clone: settings and hooks of the agent's repository must not run here.
_CLONE = (
    "set -e; git -c safe.directory='*' clone -q --no-local --no-checkout file://$PWD /tmp/clone; "
    "cd /tmp/clone; "
)


def _same(path: str, text: str) -> str:
    """A check that a file is a regular one with this text."""
    return f"set -e; test -f {path}; test ! -L {path}; cmp {path} - <<'END'\n{text}END\n"


def _answer(text: str) -> str:
    return (
        "test -f answer.txt && test ! -L answer.txt && "
        f"test \"$(tr -d '[:space:]' <answer.txt)\" = '{text}'"
    )


def _task(name: str, instruction: str, *, setup: str = "", **rest: object) -> TerminalTask:
    steps = (RunStep(command=setup, cwd="/app", line=f"the setup of {name}"),) if setup else ()
    made = {"id": name, "instruction": instruction, "steps": steps, "file_mb": 64, **rest}
    return TerminalTask(**made)  # pyright: ignore[reportArgumentType]  # they are written below


_TASKS = [
    _task(
        "count-words",
        "How often does the word `whale` occur in /app/book.txt? Count it as a whole word, in any case "
        "(`whales` is another word). Write the number, alone, to /app/answer.txt.",
        files={"book.txt": _BOOK + "\n"},
        check=_answer(str(_WHALES)),
        solution="grep -oiw whale book.txt | wc -l > answer.txt",
    ),
    _task(
        "fix-permissions",
        "In /app, the scripts (bin/*.sh) must be executable by everyone and writable by their owner alone "
        "(755), and the keys (keys/*.pem) readable and writable by their owner alone (600). Mend the "
        "permissions; change no other file.",
        setup="mkdir bin keys; for n in a b c; do echo 'echo hi' >bin/$n.sh; echo k >keys/$n.pem; done; "
        "echo read me >bin/README; echo p >keys/a.pub; "
        "chmod 644 bin/* keys/*; chmod 777 bin/b.sh; chmod 666 keys/c.pem",
        check="set -e; test \"$(stat -c '%a %F' bin/*.sh | sort -u)\" = '755 regular file'; "
        "test \"$(stat -c '%a %F' keys/*.pem | sort -u)\" = '600 regular file'; "
        'test "$(stat -c %a bin/README keys/a.pub | sort -u)" = 644; '
        'test "$(ls bin keys | wc -l)" = 11',
        solution="chmod 755 bin/*.sh; chmod 600 keys/*.pem",
    ),
    _task(
        "sort-csv",
        "/app/people.csv has a header and then rows in no order, some of them several times. Write the same "
        "header and each row once, ordered by the number in the first column, to /app/clean.csv.",
        files={"people.csv": _CSV},
        check=_same("clean.csv", _SORTED),
        solution="(head -1 people.csv; tail -n +2 people.csv | sort -t, -k1,1n -u) > clean.csv",
    ),
    _task(
        "largest-file",
        "Which regular file below /app/data has the most bytes? Hidden files count. Write its "
        "path, beginning "
        "with /app/data, to /app/answer.txt.",
        setup="mkdir -p data/a/.cache data/b/c; head -c 9000 /dev/zero >data/a/big; "
        "head -c 12345 /dev/zero >data/a/.cache/blob; head -c 12000 /dev/zero >data/b/c/almost; "
        "ln -s /usr/bin/env data/link; seq 900 >data/b/list",
        check=_answer("/app/data/a/.cache/blob"),
        solution="find /app/data -type f -printf '%s %p\\n' | sort -rn | head -1 | cut -d' ' "
        "-f2- > answer.txt",
    ),
    _task(
        "repair-script",
        "`bash /app/backup.sh` should copy every regular file directly in /app/notes, also "
        "those with blanks in "
        "their names, to /app/backup with `.bak` added to each name, and end with exit code 0. It is broken. "
        "Repair it; it will be run once more, on other files.",
        files={
            "backup.sh": "#!/bin/bash\nset -e\nmkdir /app/backup\nfor file in `ls /app/notes`\n"
            '  cp /app/notes/$file /app/backup/$file.bak"\ndone\n'
        },
        setup="mkdir notes; echo one >notes/plain; echo two >'notes/two words'",
        run="rm -rf backup notes; mkdir -p notes/folder; echo 1 >notes/x; echo 2 >'notes/a  b c'; "
        "echo 3 >notes/-n; timeout 20 bash backup.sh",
        check='set -e; test "$RUN_EXIT_CODE" = 0; test ! -L backup; test "$(ls -A backup | wc -l)" = 3; '
        'test "$(cat backup/x.bak)" = 1; test "$(cat \'backup/a  b c.bak\')" = 2; '
        'test "$(cat backup/-n.bak)" = 3',
        solution="cat >backup.sh <<'END'\n#!/bin/bash\nset -e\nmkdir -p /app/backup\n"
        'for file in /app/notes/*; do\n  [ -f "$file" ] || continue\n'
        '  cp -- "$file" "/app/backup/$(basename -- "$file").bak"\ndone\nEND',
    ),
    _task(
        "top-addresses",
        "/app/access.log is a web server's log; each line begins with the client's address. Write the five "
        "addresses with the most lines to /app/top.txt, a line each: the address, one blank, "
        "the number. Most "
        "first; where two have as many, the one that sorts first as text.",
        files={"access.log": _LOG},
        check=_same("top.txt", _TOP),
        solution="cut -d' ' -f1 access.log | LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2 | head -5 "
        "| awk '{print $2, $1}' > top.txt",
    ),
    _task(
        "rename-photos",
        "Rename the photos in /app/photos (IMG_<number>.JPG) to photo-<number>.jpg, the number with three "
        "digits: IMG_7.JPG becomes photo-007.jpg. Leave all other files as they are.",
        setup="mkdir photos; for n in 1 7 42 108; do echo picture $n >photos/IMG_$n.JPG; done; "
        "echo keep >photos/IMG_list.txt; echo keep >photos/old.jpg",
        check="set -e; cd photos; test ! -L .; "
        "test \"$(ls -A | LC_ALL=C sort | tr '\\n' ' ')\" = "
        "'IMG_list.txt old.jpg photo-001.jpg photo-007.jpg photo-042.jpg photo-108.jpg '; "
        'for n in 1 7 42 108; do test "$(cat photo-$(printf %03d $n).jpg)" = "picture $n"; done',
        solution="cd photos; for f in IMG_*.JPG; do n=${f#IMG_}; n=${n%.JPG}; "
        'mv "$f" "photo-$(printf %03d "$n").jpg"; done',
    ),
    _task(
        "unpack-nested",
        "/app/parcel.tar holds archives within archives, of several kinds. Somewhere inside is a file "
        "`letter.txt`. Put it at /app/letter.txt.",
        setup="mkdir in; echo 'Dear reader, well unpacked.' >in/letter.txt; echo no >in/other.txt; "
        "tar -C in -cf - . | gzip >inner.tgz; rm -r in; mkdir mid; mv inner.tgz mid/; echo no >mid/notes; "
        "tar -cf mid.tar mid; rm -r mid; gzip mid.tar; tar -cf parcel.tar mid.tar.gz; rm mid.tar.gz",
        check=_same("letter.txt", "Dear reader, well unpacked.\n"),
        solution="mkdir -p /tmp/u && tar -xf parcel.tar -C /tmp/u && cd /tmp/u && tar -xzf mid.tar.gz && "
        "tar -xzf mid/inner.tgz && cp letter.txt /app/letter.txt",
    ),
    _task(
        "dangling-links",
        "Below /app/links are symbolic links. Remove those that lead nowhere; keep all others "
        "and every other "
        "file.",
        setup="mkdir -p links/sub real; echo x >real/x; ln -s ../real/x links/good; ln -s /usr "
        "links/sub/usr; "
        "ln -s ../real/y links/bad; ln -s /no/where 'links/sub/bad too'; "
        "echo file >links/file",
        check="test \"$(find links | LC_ALL=C sort | tr '\\n' ' ')\" = "
        "'links links/file links/good links/sub links/sub/usr ' && test -L links/good && test "
        "-L links/sub/usr "
        '&& test "$(readlink links/good)" = ../real/x && test "$(cat real/x links/file)" = "x\nfile"',
        solution="find links -xtype l -delete",
    ),
    _task(
        "rename-function",
        "In the Python files below /app/src, rename the function `fetch` to `load_page` everywhere, without "
        "touching names that only contain it (`prefetch`, `fetch_all`) or other kinds of files.",
        files={
            "src/net.py": "def fetch(url):\n    return url\n\n\ndef fetch_all(urls):\n"
            "    return [fetch(u) for u in urls]\n",
            "src/app/main.py": "from net import fetch, fetch_all\n\nprefetch = fetch('x')\nprint(fetch)\n",
            "src/NOTES.md": "Call fetch to fetch.\n",
        },
        check=_same(
            "src/net.py",
            "def load_page(url):\n    return url\n\n\ndef fetch_all(urls):\n"
            "    return [load_page(u) for u in urls]\n",
        )
        + _same(
            "src/app/main.py",
            "from net import load_page, fetch_all\n\nprefetch = load_page('x')\nprint(load_page)\n",
        )
        + _same("src/NOTES.md", "Call fetch to fetch.\n"),
        solution="find src -name '*.py' -exec sed -i 's/\\bfetch\\b/load_page/g' {} +",
    ),
    _task(
        "edit-settings",
        "In /app/settings.ini, set `port` in the section [server] to 8080, add `debug = no` to the section "
        "[log], and change nothing else; the order of the lines within a section doesn't matter.",
        files={
            "settings.ini": "[server]\nhost = localhost\nport = 80\n\n[client]\nport = 80\n\n"
            "[log]\nlevel = info\n"
        },
        check='test ! -L settings.ini && test "$(awk \'/^\\[/ {s=$0; next} NF {gsub(/ /, ""); print s $0}\' '
        "settings.ini | LC_ALL=C sort | tr '\\n' ' ')\" = '[client]port=80 [log]debug=no [log]level=info "
        "[server]host=localhost [server]port=8080 '",
        solution="sed -i '/^\\[server\\]/,/^\\[/ s/^port = 80$/port = 8080/; "
        "/^\\[log\\]/a debug = no' settings.ini",
    ),
    _task(
        "join-tables",
        "/app/prices.tsv has an article and its price in each line, /app/orders.tsv an article and how many "
        "were ordered; the columns are separated by tabs, prices are whole numbers. Articles without a price "
        "are free. Write the sum of all orders to /app/answer.txt.",
        files={
            "prices.tsv": "apple\t3\nbread\t4\nsalt\t1\nwine\t12\n",
            "orders.tsv": "wine\t2\napple\t10\nwater\t7\napple\t5\nsalt\t1\n",
        },
        check=_answer("70"),
        solution="awk -F'\\t' 'NR==FNR {p[$1]=$2; next} {s+=p[$1]*$2} END {print s}' prices.tsv orders.tsv "
        "> answer.txt",
    ),
    _task(
        "start-a-server",
        "Something must answer on port 8000 of 127.0.0.1, by HTTP, and give the content of "
        "/app/site/hello.txt "
        "for /hello.txt. Start it and leave it running; python3 is there.",
        files={"site/hello.txt": "hello from the server\n"},
        check_in_place=True,
        check="python3 -I -c \"import urllib.request as u; r = u.urlopen('http://127.0.0.1:8000/hello.txt', "
        "timeout=5); assert r.read() == b'hello from the server\\n'\"",
        solution="cd site; nohup python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &\n"
        "for n in $(seq 100); do (: </dev/tcp/127.0.0.1/8000) 2>/dev/null && break; sleep 0.1; done",
    ),
]
_GIT_TASKS = [
    _task(
        "git-commit",
        "In the git repository /app, commit the change to config.txt on the branch main with the message "
        "`Raise the limit`, and see to it that *.log files are ignored from that commit on. No .log file may "
        "be in the repository.",
        setup=_GIT
        + "echo limit=1 >config.txt; git add .; git commit -q -m First; echo limit=5 >config.txt; "
        "echo noise >run.log",
        check=_CLONE + "test \"$(git log -1 --format=%s origin/main)\" = 'Raise the limit'; "
        'test "$(git rev-list --count origin/main)" = 2; '
        'test "$(git show origin/main:config.txt)" = limit=5; '
        "test \"$(git ls-tree -r --name-only origin/main | tr '\\n' ' ')\" = '.gitignore config.txt '; "
        "git show origin/main:.gitignore | grep -qxE '(/|\\*\\*/)?\\*\\.log'",
        solution="echo '*.log' >.gitignore; git add .gitignore config.txt; "
        "git -c user.name=B -c user.email=b@example.org commit -q -m 'Raise the limit'",
    ),
    _task(
        "git-merge",
        "In the git repository /app, merge the branch `polite` into `main`. Both have changed "
        "greeting.txt: the "
        "result must greet as `polite` does, and be signed as in `main`. No marks of a conflict may be left; "
        "make it a merge commit.",
        setup=_GIT + "printf 'Hi.\\nNobody\\n' >greeting.txt; git add .; git commit -q -m First; "
        "git checkout -q -b polite; printf 'Good day to you.\\nNobody\\n' >greeting.txt; "
        "git commit -qam Polite; git checkout -q main; printf 'Hi.\\nThe staff\\n' >greeting.txt; "
        "git commit -qam Sign",
        check=_CLONE
        + 'test "$(git show origin/main:greeting.txt)" = "$(printf \'Good day to you.\\nThe '
        'staff\')"; test "$(git rev-list --parents -1 origin/main | wc -w)" = 3; '
        "test \"$(git log --format=%s origin/main | grep -cxE 'First|Polite|Sign')\" = 3",
        solution="git -c user.name=B -c user.email=b@example.org merge -q polite || true\n"
        "printf 'Good day to you.\\nThe staff\\n' >greeting.txt; git add greeting.txt; "
        "git -c user.name=B -c user.email=b@example.org commit -q -m Merge",
    ),
]


@functools.cache
def default_tasks() -> tuple[TerminalTask, ...]:
    """The tasks that this machine has the programs for, in a fixed order."""
    return (*_TASKS, *(_GIT_TASKS if shutil.which("git") else ()))


def scripted_action(text: str, *, rng: np.random.Generator, skill: float) -> str:
    """Solves the built-in task that a text speaks of, or, less skilled, hands it in unsolved; then submits.

    Args:
        text: The latest observation, or all of the episode.
        rng: For skill.
        skill: How often the task is solved, 0 to 1.
    """
    submit = "```bash\nsubmit\n```"
    for task in default_tasks():
        if task.instruction in text and task.solution not in text and rng.random() < skill:
            return f"```bash\n{task.solution}\n```"
    return submit
