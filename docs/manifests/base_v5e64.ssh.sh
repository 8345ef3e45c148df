#!/bin/bash
# Each host of the job runs this, by `bash -s INDEX`. The values of its secrets follow, each with a NUL at its end.
# Sets capibara_is to what became of the attempt in a folder, and capibara_group and capibara_began.
capibara_look() {
  local start boot stat fields
  capibara_is=absent capibara_group= capibara_began="$(stat --format=%Y "$1/attempt" 2> /dev/null)"
  [ -e "$1/process" ] || return 0
  read -r capibara_group start boot capibara_began < "$1/process"
  capibara_is=ended
  [ ! -e "$1/code" ] || return 0
  capibara_is=rebooted
  [ "$boot" = "$(< /proc/sys/kernel/random/boot_id)" ] || return 0
  capibara_is=killed
  # Its group is there as long as one of its processes is. If its first process is another one, the number was used again.
  for stat in "/proc/$capibara_group/stat" /proc/[0-9]*/stat; do
    { read -r fields < "$stat"; } 2> /dev/null || continue
    fields=(${fields##*') '})
    [ "$stat" != "/proc/$capibara_group/stat" ] || [ "${fields[19]}" = "$start" ] || return 0
    if [ "${fields[2]}" = "$capibara_group" ] && [[ "${fields[0]}" != [ZX] ]]; then
      capibara_is=running
      return 0
    fi
  done
}

# Keeps what an attempt that has ended has left, in the place of the one before.
capibara_retire() {
  rm -rf "$1/before" && mv "$1/now" "$1/before"
}

# What was to be stopped is no longer there once it has ended; it is killed when its time to save is over.
capibara_settle() {
  local sent now
  capibara_look "$1/now"
  [ -e "$1/now/stopping" ] || return 0
  if [ "$capibara_is" != running ]; then
    capibara_retire "$1" && capibara_is=absent
  else
    read -r sent < "$1/now/stopping" && read -r now < /proc/uptime &&
      (( ${now%%.*} - sent >= $(< "$1/now/grace_s") )) && kill -s KILL -- "-$capibara_group"
  fi
}

capibara_start() {
capibara_hosts=(gpu0 gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7)
capibara_host="${capibara_hosts[${1:?must be the index of this host}]:?}"
capibara_folder="$HOME"/.capibara/jobs/base-v5e64/"$capibara_host"
capibara_attempt=0-0
capibara_job='{"hosts": ["gpu0", "gpu1", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6", "gpu7"], "labels": {"capibara-attempt": "0", "capibara-failures": "0", "capibara-job": "base-v5e64", "capibara-launch": "0", "capibara-spec": "0e6f07939bc5df53", "capibara-spent": "0"}}'
export JAX_COORDINATOR_ADDRESS=gpu0:8476 JAX_NUM_PROCESSES=8
export JAX_PROCESS_ID="$1"

command -v flock > /dev/null && command -v setsid > /dev/null || return 12
capibara_umask="$(umask)"; umask 077
mkdir -p "$capibara_folder" && exec 9> "$capibara_folder/lock" || return 1
flock --wait 10 9 || return 75
capibara_settle "$capibara_folder"
if [ "$capibara_is" != absent ]; then
  if [ "$(< "$capibara_folder/now/attempt")" = "$capibara_attempt" ]; then
    return 10
  elif [ "$capibara_is" = running ]; then
    return 11
  fi
  capibara_retire "$capibara_folder" || return 1
fi
rm -rf "$capibara_folder/new" "$capibara_folder/now" && mkdir "$capibara_folder/new" &&
  printf "%s\n" "$capibara_job" > "$capibara_folder/new/job.json" &&
  printf "%s\n" "$capibara_attempt" > "$capibara_folder/new/attempt" &&
  echo 330 > "$capibara_folder/new/grace_s" &&
  mv "$capibara_folder/new" "$capibara_folder/now" || return 1
umask "$capibara_umask"
# It keeps the lock until its process is on record: so no second one can start, whatever ends this script.
setsid bash -c 'capibara_signalled=
trap capibara_signalled=1 TERM
{ read -r line < "/proc/$$/stat"; fields=(${line##*'"'"') '"'"'})
echo "$$ ${fields[19]} $(< /proc/sys/kernel/random/boot_id) $(date +%s)" > "$0/process.new"; } || exit
mv "$0/process.new" "$0/process" || exit
exec 9>&- 3>&2 2> "$0/signal"
code=143
if [ -z "$capibara_signalled" ]; then
  "$@" 2>&3 3>&-
  code=$?
fi
# After 137 the shell has said here whether SIGKILL was the cause, which is no exit code.
if [ "$code" != 137 ] || [ ! -s "$0/signal" ]; then
  echo "$code" > "$0/code.new" && mv "$0/code.new" "$0/code"
fi' "$capibara_folder/now" \
  python -m capibara.launch staged --url=/shared/jobs/base-v5e64/e3b0c44298fc1c14 --sha256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 --restarts=10 --grace=300 --reports=/shared/jobs/base-v5e64/reports/0-0 -- train --gin_file=base_v5e64.gin '--gin_bindings=Plan.slice = "8xh100-8"' '--gin_bindings=Trainer.model_dir = "/shared/runs/base_v5e64"' \
  < /dev/null > "$capibara_folder/now/log" 2>&1 &
exec 9>&-
flock --wait 10 "$capibara_folder/lock" test -e "$capibara_folder/now/process" || return 75
printf '\ncapibara-job\n'
}
capibara_start "$@"; exit
