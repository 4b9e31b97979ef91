"""A headless Chromium, spoken to in its own protocol (DevTools) over a pair of pipes: no driver, no port, no package."""

import base64
import json
import os
import selectors
import shutil
import subprocess
import time

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """One page in a browser of its own. `console` collects errors and warnings, `requests` every address asked for."""

    def __init__(self, folder):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The protocol's pipes are file descriptors 3 and 4, which the shell puts in place.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--remote-debugging-pipe", f"--user-data-dir={folder}"]  # fmt: skip
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *flags], pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._buffer, self._count, self._session = b"", 0, None
        self.console, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._session = None
            self.call("Browser.close", timeout=10)
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):  # OSError: also TimeoutError, a broken pipe
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, timeout=60, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while (answer := self._next(end - time.monotonic(), method)).get("id") != self._count:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self, timeout, method):
        while b"\0" not in self._buffer:
            if timeout <= 0 or not self._selector.select(timeout):
                raise TimeoutError(f"the browser does not answer {method}")
            read = os.read(self._read, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _event(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def js(self, expression):
        """The value of an expression in the page, promises awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression, timeout=60):
        end = time.monotonic() + timeout
        while not (value := self.js(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}; console: {self.console}")
            time.sleep(0.05)
        return value

    def size(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, path):
        self.call("Page.navigate", url=f"file://{path}")
        self.wait("document.readyState == 'complete' && location.protocol == 'file:'")

    def key(self, name, code):
        """A key pressed and let go, where the focus is."""
        text = {"text": "\r"} if name == "Enter" else {"text": " "} if name == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path):
        """Of the whole page, to look at."""
        content = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": content["width"], "height": min(content["height"], 6000), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png", clip=clip)
        with open(path, "wb") as f:
            f.write(base64.b64decode(shot["data"]))
