"""`gcloud storage` of the stand-in for gcloud, against the stand-in for Cloud Storage at $STORAGE_EMULATOR_HOST.

Standard library alone, as the hosts have it: (name, flags, words) of a command, parsed and checked by `gcloud`.
"""

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request


def fail(words):
    print(words, file=sys.stderr)
    sys.exit(1)


def ask(path, data=None, method=None, headers=None):
    address = os.environ["STORAGE_EMULATOR_HOST"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(address + path, data=data, method=method, headers=headers or {})
    with opener.open(request, timeout=60) as answer:
        return answer.read()


def split(url):
    bucket, _, name = url[len("gs://") :].partition("/")
    return bucket, name


def path_of(url):
    bucket, name = split(url)
    return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"


def names(url, delimiter=""):
    """(objects, folders) below a URL, whole pages of them."""
    bucket, prefix = split(url)
    objects, folders, token = [], [], ""
    while True:
        query = {"prefix": prefix, "delimiter": delimiter, "pageToken": token}
        query = urllib.parse.urlencode({key: value for key, value in query.items() if value})
        page = json.loads(ask(f"/storage/v1/b/{bucket}/o?{query}"))
        objects += [item["name"] for item in page.get("items", [])]
        folders += page.get("prefixes", [])
        token = page.get("nextPageToken", "")
        if not token:
            return [f"gs://{bucket}/{name}" for name in objects], [f"gs://{bucket}/{name}" for name in folders]


def matching(name, url):
    """The objects and folders that a URL, which may have a `*`, names."""
    head, star, _ = url.partition("*")
    objects, folders = names(head if star else url, "" if star else "/")
    if star:
        pattern = re.compile(".*".join(map(re.escape, url.split("*"))))
        found = [o for o in objects if pattern.fullmatch(o)]
    else:
        found = [o for o in objects if o == url]
        if f"{url.rstrip('/')}/" in folders or url.endswith("/"):
            inside, below = names(f"{url.rstrip('/')}/", "/")
            found += inside + below
    if not found:
        fail(f"ERROR: (gcloud.{name.replace(' ', '.')}) The following URLs matched no objects or files:\n{url}")
    return found


def read(url):
    return ask(f"{path_of(url)}?alt=media")


def write(url, data):
    bucket, name = split(url)
    query = urllib.parse.urlencode({"uploadType": "media", "name": name})
    ask(f"/upload/storage/v1/b/{bucket}/o?{query}", data, "POST", {"Content-Type": "application/octet-stream"})


def cp(name, flags, words):
    *sources, target = words
    for source in sources:
        if source == "-":
            data = sys.stdin.buffer.read()
        elif source.startswith("gs://"):
            data = read(source)
        else:
            data = open(source, "rb").read()
        base = os.path.basename(source)
        if target == "-":
            sys.stdout.buffer.write(data)
        elif target.startswith("gs://"):
            write(target + base if target.endswith("/") else target, data)
        else:
            with open(os.path.join(target, base) if os.path.isdir(target) else target, "wb") as f:
                f.write(data)


def cat(name, flags, words):
    for url in words:
        for one in matching(name, url) if "*" in url else [url]:
            data = read(one)
            begin, _, end = flags.get("range", "0-").partition("-")
            if int(begin) and int(begin) >= len(data):
                fail("ERROR: (gcloud.storage.cat) HTTPError 416: The requested range cannot be satisfied.")
            sys.stdout.buffer.write(data[int(begin) : int(end) + 1 if end else None])


def rm(name, flags, words):
    for url in words:
        found = names(url.rstrip("*"))[0] if "recursive" in flags else matching(name, url)
        if not found:
            fail(f"ERROR: (gcloud.storage.rm) The following URLs matched no objects or files:\n{url}")
        for one in found:
            ask(path_of(one), method="DELETE")


def ls(name, flags, words):
    found = sorted(matching(name, words[0]))
    if "long" in flags:
        sized = [one if one.endswith("/") else f"{len(read(one)):>10}  2026-01-01T00:00:00Z  {one}" for one in found]
        found = [*sized, f"TOTAL: {len(found)} objects, 0 bytes (0B)"]
    print("\n".join(found))


def rsync(name, flags, words):
    source, target = (word.rstrip("/") for word in words)
    if source.startswith("gs://"):
        found = [one for one in names(f"{source}/")[0] if not one.endswith("/")]
        files = {one[len(source) + 1 :]: one for one in found}
    else:
        paths = [os.path.join(root, file) for root, _, inside in os.walk(source) for file in inside]
        files = {os.path.relpath(path, source): path for path in paths}
    if not files:
        fail(f"ERROR: (gcloud.storage.rsync) Did not find existing container at: {words[0]}")
    for path, one in files.items():
        if not re.match(flags.get("exclude") or "$^", path):
            if not target.startswith("gs://"):
                os.makedirs(os.path.dirname(os.path.join(target, path)) or ".", exist_ok=True)
            cp(name, {}, [one, f"{target}/{path}"])


def buckets(name, flags, words):
    print(ask(f"/storage/v1/b/{split(words[0])[0]}").decode())


HANDLERS = {
    "storage cp": cp,
    "storage cat": cat,
    "storage rm": rm,
    "storage ls": ls,
    "storage rsync": rsync,
    "storage buckets describe": buckets,
}


def run(name, flags, words):
    try:
        HANDLERS[name](name, flags, words)
    except urllib.error.HTTPError as e:
        fail(f"ERROR: (gcloud.{name.replace(' ', '.')}) HTTPError {e.code}: {e.read().decode(errors='replace')[:300]}")
