#!/bin/bash
# A second bootstrap action of EMR, for GPUs: YARN isolates them by cgroups of version 1, which it
# finds here. The commands are those of AWS.
# Never run on EMR: bash -n and shellcheck only.
set -euo pipefail
sudo mkdir -p /spark-rapids-cgroup/devices
sudo mount -t cgroup -o devices cgroupv1-devices /spark-rapids-cgroup/devices
sudo chmod a+rwx -R /spark-rapids-cgroup
