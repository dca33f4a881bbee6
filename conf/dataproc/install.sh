#!/bin/bash
# An initialization action of Dataproc: creates the environment of the driver and the ranks on each
# node, as root. The cluster's metadata "setup" is the folder of requirements.txt and the wheel.
# Never run on Dataproc: bash -n and shellcheck only.
set -euo pipefail
apt-get update
apt-get install -y python3-venv
/usr/bin/python3 -m venv /opt/venv
cd "$(mktemp -d)"
gcloud storage cp -r "$(/usr/share/google/get_metadata_value attributes/setup)/*" .
/opt/venv/bin/python -m pip install --no-cache-dir -r requirements.txt
