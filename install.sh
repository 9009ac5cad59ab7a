#!/bin/sh
# Installs servd into a virtual environment of its own.
set -eu

TORCH="torch==2.13.0" # as in the Makefile
CPU_TORCH_INDEX="https://download.pytorch.org/whl/cpu"

usage() {
    cat <<'END'
Usage: sh install.sh [OPTION]...

Installs servd into a virtual environment of its own, and links the command `servd`. Without an NVIDIA GPU, the build
of torch for CPUs is installed, which is smaller by gigabytes.

  --from PACKAGE   what to install: a wheel or a folder (default: the checkout with this script)
  --prefix FOLDER  the environment's folder (default: ~/.local/share/servd, or /opt/servd as root)
  --bin FOLDER     where `servd` is linked (default: ~/.local/bin, or /usr/local/bin as root)
  --python PYTHON  Python 3.11 or later (default: the newest that is found)
  --cpu            install torch for CPUs although there is a GPU
  --systemd        write and enable the service `servd`; needs root
  --print-unit     print the unit of that service, and install nothing
  --help           print this text

To upgrade, run it again. To remove servd, delete the environment's folder and the link.
END
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

unit() {
    cat <<END
[Unit]
Description=servd, an LLM server
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=all
ExecStart=$prefix/bin/servd serve --config /etc/servd/servd.toml
ExecReload=/bin/kill -HUP \$MAINPID
User=servd
Group=servd

# cache: models, compiled kernels
CacheDirectory=servd
CacheDirectoryMode=0750
Environment=XDG_CACHE_HOME=/var/cache/servd HF_HOME=/var/cache/servd/huggingface
# optional: HF_TOKEN=..., SERVD_API_KEY=...
EnvironmentFile=-/etc/servd/environment

# start and stop
TimeoutStartSec=30min
KillMode=mixed
TimeoutStopSec=75
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
LimitNOFILE=65536

# hardening
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=$private_devices
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077

[Install]
WantedBy=multi-user.target
END
}

has_gpu() {
    nvidia-smi --list-gpus >/dev/null 2>&1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for name in python3.13 python3.12 python3.11 python3; do
        if is_new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "servd needs Python 3.11 or later. Install it, or name it with --python."
}

# The folder of this script. In the public registry, another project has the name servd.
find_package() {
    folder=$(cd "$(dirname "$0")" && pwd)
    grep -q '^name = "servd"' "$folder/pyproject.toml" 2>/dev/null ||
        fail "$folder is not a checkout of servd. Name a wheel: --from servd-VERSION.whl"
    echo "$folder"
}

install_service() {
    id servd >/dev/null 2>&1 || useradd --system --shell /usr/sbin/nologin servd
    install -d -o root -g servd -m 750 /etc/servd
    if [ ! -e /etc/servd/servd.toml ]; then
        # The number is --shutdown-timeout; the unit's TimeoutStopSec is 15 more.
        printf 'host = "127.0.0.1"\nshutdown-timeout = 60\n' >/etc/servd/servd.toml
        chown root:servd /etc/servd/servd.toml
        chmod 640 /etc/servd/servd.toml
    fi
    unit >/etc/systemd/system/servd.service
    systemctl daemon-reload
    systemctl enable --now servd
    echo "The service runs. Its options: /etc/servd/servd.toml. Its log: journalctl -u servd"
}

if [ "$(id -u)" = 0 ]; then
    prefix=/opt/servd
    bin=/usr/local/bin
else
    prefix=${HOME:?}/.local/share/servd
    bin=$HOME/.local/bin
fi
package=
python=
for_cpu=no
service=no
print_unit=no
while [ $# -gt 0 ]; do
    case $1 in
    --from | --prefix | --bin | --python)
        [ $# -gt 1 ] || fail "$1 needs a value"
        case $1 in
        --from) package=$2 ;;
        --prefix) prefix=$2 ;;
        --bin) bin=$2 ;;
        --python) python=$2 ;;
        esac
        shift
        ;;
    --cpu) for_cpu=yes ;;
    --systemd) service=yes ;;
    --print-unit) print_unit=yes ;;
    --help | -h)
        usage
        exit
        ;;
    *) fail "unknown option $1; see --help" ;;
    esac
    shift
done

private_devices=yes
if [ $for_cpu = no ] && has_gpu; then
    private_devices=no
else
    for_cpu=yes
fi
if [ $print_unit = yes ]; then
    unit
    exit
fi
if [ $service = yes ]; then
    [ "$(id -u)" = 0 ] || fail "--systemd needs root: sudo sh install.sh --systemd"
    command -v systemctl >/dev/null || fail "--systemd needs systemd"
fi
if [ -z "$python" ]; then
    python=$(find_python)
elif ! is_new_enough "$python"; then
    fail "$python is not Python 3.11 or later"
fi
if [ -z "$package" ]; then
    package=$(find_package)
fi

if [ ! -x "$prefix/bin/python" ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"
    echo "Creating $prefix"
    "$python" -m venv "$prefix"
fi
# Modules are compiled when they are imported: of thousands a few hundred are.
pip() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0 "$prefix/bin/python" -m pip "$@"
}
echo "Installing $TORCH"
if [ $for_cpu = yes ]; then
    pip install --quiet --retries 1 --extra-index-url "$CPU_TORCH_INDEX" "$TORCH"
else
    pip install --quiet "$TORCH"
fi
echo "Installing $package"
SERVD_KERNELS=${SERVD_KERNELS:-native} pip install --quiet --upgrade "$package"
mkdir -p "$bin"
ln -sf "$prefix/bin/servd" "$bin/servd"
if [ $service = yes ]; then
    install_service
    exit
fi
case :$PATH: in
*:"$bin":*) servd=servd ;;
*) servd=$bin/servd ;;
esac
echo "Installed. Start the demo model with: $servd serve"
