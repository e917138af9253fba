#!/bin/sh
# Boots this machine's systemd in namespaces, over its own files; what it writes goes to memory.
#
#   boot.sh FOLDER [FROM:TO]...    FOLDER is empty and stays so; each FROM is seen inside as TO
#
# Each boot tells the process number of its first process, a reboot inside is a boot more, and
# `ended` says that there was another end. Everything goes when standard input ends.
set -eu
script=$(realpath "$0")

hold() {
  mount -t tmpfs -o mode=755 tmpfs "$work"
  cd "$work"
  mkdir groups
  overlay / written/root root
  prepare
  umount root
  mount -t cgroup2 cgroup2 groups
  group=groups/hearth-test-$$
  mkdir "$group"
  boots "$@" </dev/null &
  while read -r _; do :; done
  echo 1 >"$group/cgroup.kill"
  wait
  until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null; do sleep 0.05; done
}

# What lies below, where changes of it go, and where both are seen.
overlay() {
  mkdir -p "$2/changes" "$2/work" "$3"
  mount -t overlay -o "lowerdir=$1,upperdir=$2/changes,workdir=$2/work" overlay "$3"
}

# Nothing of what this machine enables, and nothing that a kernel has once for all namespaces.
prepare() {
  rm -rf root/etc/systemd/system root/etc/rc?.d
  mkdir root/etc/systemd/system
  for unit in dev-hugepages.mount dev-mqueue.mount proc-sys-fs-binfmt_misc.automount \
    sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount \
    sys-kernel-tracing.mount getty.target kmod-static-nodes.service modprobe@.service \
    systemd-binfmt.service systemd-journald-audit.socket systemd-modules-load.service \
    systemd-random-seed.service systemd-remount-fs.service systemd-sysctl.service \
    systemd-tmpfiles-setup-dev.service systemd-udevd.service; do
    ln -s /dev/null "root/etc/systemd/system/$unit"
  done
}

boots() {
  echo 0 >"$group/cgroup.procs"
  status=129
  while [ "$status" -eq 129 ]; do # so ends a namespace whose first process reboots
    status=0
    unshare --mount --pid --fork --kill-child --cgroup --uts --ipc --net \
      sh "$script" --boot "$work" "$@" || status=$?
  done
  echo ended
}

boot() {
  cd "$work"
  overlay / written/root root
  for bound; do
    overlay "${bound%%:*}" "written${bound#*:}" "root${bound#*:}"
  done
  cd root
  read -r first _ </proc/self/stat
  mount -t proc proc proc
  mount --bind -o ro proc/sys proc/sys
  mount -t sysfs -o ro sysfs sys
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  # Other people's environments are not there at all, as for a service.
  mount -t tmpfs -o mode=700 tmpfs root
  mount -t tmpfs -o mode=755 tmpfs home
  mount -t tmpfs -o mode=755 tmpfs run
  mount -t tmpfs -o mode=1777 tmpfs tmp
  mount -t tmpfs -o mode=755 tmpfs dev
  mkdir dev/pts dev/shm run/before
  mount -t tmpfs -o mode=1777 tmpfs dev/shm
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
  for node in null zero full random urandom tty; do
    touch "dev/$node"
    mount --bind "/dev/$node" "dev/$node"
  done
  ln -s /proc/self/fd dev/fd
  ln -s pts/ptmx dev/ptmx
  pivot_root . run/before
  umount -l run/before
  rmdir run/before
  echo "$first"
  exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --log-level=warning </dev/null >/dev/null 2>&1
}

action=hold
if [ "$1" = --boot ]; then
  action=boot
  shift
fi
work=$1
shift
"$action" "$@"
