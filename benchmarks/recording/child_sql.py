"""Runs sessions of SQL statements by SQLite in memory.

Reads {"limits", "tables", "setup", "sessions"} from standard input and writes [number of the session, execution] lines. The
tables are CSV files, which are read before the first session; each session's changes are rolled back. Statements can neither
open files nor load extensions, and end after a number of instructions, not a time.
"""

import csv
import gzip
import json
import os
import resource
import sqlite3
import sys

INSTRUCTIONS, ROWS, WIDTH = 30_000_000, 20, 60
ALLOWED = {
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        "ALTER_TABLE ANALYZE CREATE_INDEX CREATE_TABLE CREATE_TEMP_TABLE CREATE_TEMP_VIEW CREATE_TRIGGER CREATE_VIEW DELETE "
        "DROP_INDEX DROP_TABLE DROP_TEMP_TABLE DROP_TEMP_VIEW DROP_TRIGGER DROP_VIEW FUNCTION INSERT READ RECURSIVE REINDEX "
        "SELECT UPDATE SAVEPOINT"
    ).split()
}


def load(connection, path):
    """Makes a table of a CSV file, of the same name; numbers become numbers, and empty fields NULL."""
    name = os.path.basename(path).split(".")[0]
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        head = file.readline().rstrip("\r\n")
        delimiter = max("|,;\t", key=head.count)
        columns = next(csv.reader([head], delimiter=delimiter))
        quoted = ", ".join('"' + column.replace('"', '""') + '" NUMERIC' for column in columns)
        connection.execute(f'CREATE TABLE "{name}" ({quoted})')
        rows = (
            [None if field == "" else field for field in row]
            for row in csv.reader(file, delimiter=delimiter)
            if len(row) == len(columns)
        )
        connection.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})', rows)


def table(columns, rows, count):
    cells = [[_text(value) for value in row] for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [" | ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in cells]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join([*lines, f"({count} row{'s' * (count != 1)})"])


def _text(value):
    text = "NULL" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def execution(connection, code, number):
    results, failure, steps = [], None, 0

    def progress():
        nonlocal steps
        steps += 1
        return steps > 100

    connection.set_progress_handler(progress, INSTRUCTIONS // 100)
    try:
        cursor = connection.execute(code)
        rows, count = [], 0
        for row in cursor:
            count += 1
            if count <= ROWS:
                rows.append(row)
        if cursor.description:
            text = table([column[0] for column in cursor.description], rows, count)
            results.append({"text": text, "is_main_result": True})
        elif cursor.rowcount >= 0:
            results.append({"text": f"{cursor.rowcount} rows affected", "is_main_result": True})
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        name = type(error).__name__
        line = next(
            (line.strip() for line in code.split("\n") if line.strip() and not line.lstrip().startswith("--")), ""
        )
        lines = ["Traceback (most recent call last)", f"Cell In[{number}]: {line}"]
        failure = {"name": name, "value": str(error), "traceback": "\n".join([*lines, f"{name}: {error}"])}
    return {"results": results, "logs": {"stdout": [], "stderr": []}, "error": failure, "execution_count": number}


def allow(action, *about):
    if action == sqlite3.SQLITE_FUNCTION and about[1] in ("load_extension", "random", "randomblob"):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def main():
    given = json.load(sys.stdin)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA temp_store = MEMORY")  # not files, whose size is limited
    for path in given["tables"]:
        load(connection, path)
    connection.executescript(given["setup"])
    for name, value in given["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for place, cells in enumerate(given["sessions"]):
        connection.set_authorizer(None)
        connection.execute("SAVEPOINT session")
        connection.set_authorizer(allow)
        for number, code in enumerate(cells, 1):
            sys.stdout.write(json.dumps([place, execution(connection, code, number)]) + "\n")
            sys.stdout.flush()
        connection.set_authorizer(None)
        connection.execute("ROLLBACK TO session")
        connection.execute("RELEASE session")


main()
