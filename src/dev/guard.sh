# Waits for the end of the process that holds the other end of standard input, however it ends; then ends the processes
# that carry the tag of the folder $1 on their command lines, and removes the folder unless $2 is "keep".
trap '' INT TERM HUP QUIT
read -r _

cd "$1" 2>/dev/null && [ -s tag ] || exit 0

processes() {
    if [ -r /proc/self/cmdline ]; then
        grep -lFf tag /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3
    else
        ps -axo pid=,command= | grep -Ff tag | awk '{ print $1 }'
    fi
}

signal() {
    pids=$(processes)
    # Unquoted: one word for each process.
    [ -z "$pids" ] || kill -s "$1" $pids 2>/dev/null
}

# A stopped process sees nothing but KILL, so CONT first. INT is a fast and clean end for both servers; it lets
# Postgres give its shared memory back.
signal INT
signal CONT
tries=0
while [ -n "$(processes)" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || signal KILL
    [ "$tries" -lt 120 ] || break
    sleep 0.1
done

cd /
[ "$2" != keep ] || exit 0
# Again, if something without the tag (a child of initdb) was still writing.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" 2>/dev/null && break
    sleep 0.5
done
