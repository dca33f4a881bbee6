#!/bin/bash
# A bootstrap action of EMR: creates the environment of the driver and the ranks on each node. Its
# argument is the folder of requirements.txt and the wheel, such as s3://BUCKET/setup.
# Never run on EMR: bash -n and shellcheck only.
set -euo pipefail
sudo dnf install -y python3.11 python3.11-pip
sudo python3.11 -m venv /opt/venv
cd "$(mktemp -d)"
aws s3 cp --recursive "$1" .
sudo /opt/venv/bin/python -m pip install --no-cache-dir -r requirements.txt
