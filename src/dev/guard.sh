# Waits for the end of the process that holds the other end of standard input, however it ends; then stops the servers
# that carry the tag of the folder $1 in their titles, and removes the folder unless $2 is "keep".
trap '' INT TERM HUP QUIT
read -r _

cd "$1" 2>/dev/null && [ -s tag ] || exit 0

servers() {
    if [ -r /proc/self/cmdline ]; then
        grep -lFf tag /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3
    else
        ps -axo pid=,command= | grep -Ff tag | awk '{ print $1 }'
    fi
}

signal() {
    pids=$(servers)
    # Unquoted: one word for each process.
    [ -z "$pids" ] || kill -s "$1" $pids 2>/dev/null
}

# A stopped process sees nothing but KILL, so CONT first. INT is a fast and clean end for both servers; it lets
# Postgres give its shared memory back.
signal INT
signal CONT
tries=0
while [ -n "$(servers)" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || signal KILL
    [ "$tries" -lt 120 ] || break
    sleep 0.1
done

cd /
[ "$2" = keep ] || rm -rf -- "$1"
