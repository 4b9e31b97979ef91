# What every host of a detached launch does at every boot; startup.py writes the settings of the launch before it.
#
# The guest agent runs start-up scripts as root, without HOME and with a short PATH, and it waits for them: the work is done
# in the background. Every host runs the same script. The first host of the first slice also writes detached.json in the
# launch's folder, and deletes the queued resource in the end. Nothing here depends on the machine that launched.

set -u
export PATH="$PATH:/usr/local/bin:/snap/bin"
[ -n "${HOME:-}" ] || HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
export HOME CLOUDSDK_CORE_DISABLE_PROMPTS=1
pause=${PEREX_T5X_RETRY_SECONDS:-5} # before the first retry
tick=${PEREX_T5X_POLL:-5}           # seconds between two looks at something
mkdir -p "$HOME/perex/$name" && cd "$HOME/perex/$name" || exit 1

log() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $*"; }

retry() { # TIMES COMMAND...
  local times=$1 wait=$pause
  shift
  until "$@"; do
    times=$((times - 1))
    [ "$times" -gt 0 ] || return 1
    sleep "$wait"
    wait=$((wait * 2))
  done
}

ticks() { # NUMBER: waits
  local i
  for i in $(seq "$1"); do sleep "$tick"; done
}

metadata() { # KEY SECONDS: of this host
  curl -sf -m "$2" -H 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}

resource_of() { if [ "$1" = 0 ]; then echo "$name"; else echo "$name-r$1"; fi; }

read_settings() { # what differs from host to host, and from one queued resource of the launch to the next
  attempt=$(metadata attributes/perex-attempt 20) || return 1
  number=$(metadata attributes/agent-worker-number 20) || return 1
  slice=$(metadata attributes/tpu-env 20 | sed -n "s/^MEGASCALE_SLICE_ID: *'\{0,1\}\([0-9]*\).*/\1/p")
  [ "$slices" = 1 ] || [ -n "$slice" ] || return 1 # else several hosts would be the first
  slice=${slice:-0}
  index=$((number + 1000000 * slice))
  host=$(printf '%s-%04d' "$slice" "$number")
  self=$(resource_of "$attempt")
}

first() { [ "$index" = 0 ]; }

# --- the launch's folder in the bucket ----------------------------------------------------------------------------------

put() { # FILE NAME
  retry 4 gcloud storage cp "$1" "$url/$2" --project="$project" > /dev/null 2> put.err || { log "$2 was not written:"; cat put.err; }
}

state() { # STATE EXIT_CODE MESSAGE: of the whole launch
  first || return 0
  local words
  words=$(printf %s "$3" | tr -d '"\\' | LC_ALL=C tr -c '[:print:]' ' ' | cut -c 1-500)
  printf '{"version": 1, "launch_id": "%s", "resource": "%s", "attempt": %s, "project": "%s", "zone": "%s", "slices": %s, ' \
    "$launch_id" "$self" "$attempt" "$project" "$zone" "$slices" > detached.json
  printf '"state": "%s", "exit_code": %s, "restarts": %s, "max_restarts": %s, "message": "%s", "time": "%s"}\n' \
    "$1" "$2" "$restarts" "$max_restarts" "$words" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >> detached.json
  put detached.json detached.json
}

kept_state() { # KEY: from detached.json of this launch in the bucket; a number or a word
  gcloud storage cat "$url/detached.json" --project="$project" 2> /dev/null | grep -F "\"launch_id\": \"$launch_id\"" |
    sed -n "s/.*\"$1\": \"\{0,1\}\([A-Za-z0-9_.-]*\).*/\1/p"
}

put_logs() { # what the worker has not stored itself: it may have died hard
  local where="logs/$launch_id.$attempt.$starts/$host"
  tail -c 10000000 worker.log > worker.log.end 2> /dev/null && put worker.log.end "$where/host.00000.log"
  tail -c 1000000 startup.log > startup.log.end 2> /dev/null && put startup.log.end "$where/startup.00000.log"
}

# --- slices -------------------------------------------------------------------------------------------------------------

delete() { # RESOURCE: with its slices
  gcloud compute tpus queued-resources delete "$1" --project="$project" --zone="$zone" --force --async --quiet 2> delete.err ||
    grep -qE 'NOT_FOUND|was not found' delete.err
}

# Slices that were taken away do not come back, and their hosts have about half a minute. Every host asks for new ones under
# the same name, so that one of them is enough, and the cloud makes one queued resource of it.
request_successor() {
  [ ! -e successor ] || return 0
  local next
  next=$((attempt + 1))
  [ $((restarts + 1)) -le "$max_restarts" ] || return 1
  first || sleep "$tick"
  if create "$(resource_of $next)" $next 2> create.err || grep -qE 'ALREADY_EXISTS|already exists' create.err; then
    touch successor
    log "requested $(resource_of $next)"
  else
    log "$(resource_of $next) was not requested:"
    cat create.err
    return 1
  fi
}

watch_for_preemption() { # in the background; the metadata server answers as soon as it changes
  local answer
  while :; do
    answer=$(metadata preempted 20)
    if [ "$answer" = TRUE ]; then
      log "these slices are being preempted"
      touch noticed
      request_successor
      kill -TERM "$(cat worker.lock 2> /dev/null)" 2> /dev/null
      return
    fi
    metadata 'preempted?wait_for_change=true&timeout_sec=60' 70 > /dev/null || sleep "$tick"
  done
}

preempted() { # whether the slices are gone or going, by whoever knows
  [ ! -e noticed ] || return 0
  [ "$(metadata preempted 20)" != TRUE ] || return 0
  gcloud compute tpus queued-resources describe "$self" --project="$project" --zone="$zone" --format='value(state.state)' \
    2> /dev/null | grep -qE 'SUSPEND'
}

# --- the end ------------------------------------------------------------------------------------------------------------

wait_for_hosts() { # until all have stored their logs, two minutes at most
  local i
  for i in $(seq 24); do
    [ "$(gcloud storage ls "$url/ended/" --project="$project" 2> /dev/null | grep -cF "/$launch_id.$attempt.")" -lt "$hosts" ] ||
      return 0
    sleep "$tick"
  done
  log "not all of $hosts hosts have stored their logs"
}

finish() { # EXIT_CODE MESSAGE: does not return
  local i refusal
  log "ended with $1: $2"
  printf '%s %s' "$1" "$2" > ended # for the next boot, if there is one
  put_logs
  put ended "ended/$launch_id.$attempt.$host"
  if ! first; then
    # The first host deletes the slices. One that is lost does not, and they would cost money for nothing: half an hour.
    for i in $(seq 30); do
      ticks 12
      [ "$(kept_state state)" != ended ] || exit 0
    done
    log "the first host has not ended this launch"
  else
    wait_for_hosts
    state ended "$1" "$2"
  fi
  [ "$keep" = 0 ] || exit 0
  retry 5 delete "$self" && exit 0
  refusal=$(tail -n 1 delete.err)
  log "$self was not deleted, and costs money: $refusal"
  state ended "$1" "$2; $self was NOT DELETED and costs money: $refusal"
  put_logs
  exit 1
}

give_way() { # to the successor; does not return
  local words="preempted after $restarts restarts (--max_restarts=$max_restarts), and no new slices were requested"
  # First, as little time is left.
  request_successor || { state ended 1 "$words"; finish 1 "$words"; }
  restarts=$((restarts + 1))
  state preempted null "$self was preempted; $(resource_of $((attempt + 1))) continues"
  put_logs
  delete "$self"
  exit 0
}

run() { # the worker, to its end; sets code
  rm -f exit_status
  starts=$((starts + 1))
  echo "$starts" > starts
  # The same on all hosts: they start together, and all of them again where one fails.
  PEREX_T5X_HOST=$index PEREX_T5X_ATTEMPT=$attempt.$starts bash -c "$worker" >> worker.log 2>&1 < /dev/null 8>&- &
  local pid=$!
  echo "$pid" > starter.pid
  while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done # a signal interrupts `wait`
  code=$(grep -xE '[0-9]+' exit_status 2> /dev/null || echo 137)
  log "the worker ended with $code"
}

supervise() {
  exec 8> supervise.lock
  flock -n 8 || exit 0
  until read_settings; do sleep "$tick"; done
  log "boot of $host of $self"
  starts=$(cat starts 2> /dev/null || echo 0)
  restarts=$(kept_state restarts)
  restarts=${restarts:-0}
  [ "$restarts" -ge "$attempt" ] || restarts=$attempt
  # shellcheck disable=SC2046  # two words
  [ ! -e ended ] || finish $(cut -d ' ' -f 1 ended) "$(cut -d ' ' -f 2- ended)"
  state starting null ""
  if first && [ "$attempt" -gt 0 ]; then
    delete "$(resource_of $((attempt - 1)))" || log "$(resource_of $((attempt - 1))) was not deleted: $(tail -n 1 delete.err)"
  fi
  watch_for_preemption 8>&- &
  trap 'kill -TERM "$(cat worker.lock 2> /dev/null)" 2> /dev/null' TERM # at a shutdown, the job saves
  retry 5 bash -c "$copy" 8>&- || finish 1 "the bundle could not be downloaded, or is another one; see startup.log of $host"
  retry 4 bash -c "$install" 8>&- || finish 1 "the package could not be installed; see startup.log of $host"
  while :; do
    [ ! -e noticed ] || give_way
    state running null ""
    run
    case $code in
      0 | 3) finish "$code" "all jobs have ended" ;;
      2) finish 2 "a configuration error" ;;
      5) finish 5 "the loss diverged" ;;
      9) finish 9 "no progress" ;;
      10) finish 10 "stopped, as was requested" ;;
    esac
    put_logs
    for i in $(seq 12); do # asked to stop, or lost its peers: that may be the beginning of a preemption or a shutdown
      ! preempted || give_way
      [ "$code" = 130 ] || break
      sleep "$tick"
    done
    [ "$(kept_state state)" != ended ] || finish "$code" "the first host has ended this launch"
    restarts=$((restarts + 1))
    [ "$restarts" -le "$max_restarts" ] || finish "$code" "interrupted $restarts times, --max_restarts=$max_restarts"
    log "restarting ($restarts of at most $max_restarts times)"
    sleep "$tick"
  done
}

case ${1:-boot} in
  boot)
    cp "$0" startup.sh
    printf %s "$shutdown_script" > shutdown.sh
    setsid nohup bash startup.sh supervise >> startup.log 2>&1 < /dev/null &
    ;;
  supervise) supervise ;;
  shutdown) # the guest agent runs this at a shutdown, also one that is none of the cloud's
    read_settings || exit 0
    restarts=$attempt
    if [ "$(metadata preempted 5)" = TRUE ]; then request_successor >> startup.log 2>&1; fi
    ;;
esac
