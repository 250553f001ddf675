# Functions for the scripts of the descriptions.

# Waits until a command succeeds.
until_ok() {
    for _ in $(seq 1500); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.02
    done
    echo "timed out waiting until: $*" >&2
    return 1
}

# Prints the children of a process.
children_of() {
    cat "/proc/$1/task/"*/children
}

# Sends a signal to a process whose children serve, and waits for a new child.
replace_children() {
    local signal=$1 master=$2 before
    before=$(children_of "$master" | tr ' ' '\n')
    kill "-$signal" "$master"
    has_new_child() {
        children_of "$master" | tr ' ' '\n' | grep -vxFf <(echo "$before") | grep -q .
    }
    until_ok has_new_child
}

# Sends a signal and waits until the program has written one more line with this text to its log.
signal_logged() {
    local signal=$1 pid=$2 text=$3 before
    count_lines() { grep -c -- "$text" "$ROOT/log" || true; }
    before=$(count_lines)
    kill "-$signal" "$pid"
    has_more_lines() { [ "$(count_lines)" -gt "$before" ]; }
    until_ok has_more_lines
}

# Succeeds when the reloads are over.
are_reloaded() {
    [ -e "$ROOT/reloaded" ]
}

# Fetches the data by this command, the rest of it after the reloads, and compares it.
fetch_over_reloads() {
    "$@" | { head -c 1000000; until_ok are_reloaded; cat; } | cmp - "$ROOT/data"
}

# 300 requests with a connection for each; prints how many were lost and made.
http_load() {
    ab -r -q -n 300 -c 8 -s 20 "$1" >"$ROOT/ab" 2>&1 || true
    awk '/^Complete requests:/ { done = $3 } /^Failed requests:/ { failed = $3 }
        /^Non-2xx responses:/ { failed += $3 } END { print 300 - done + failed, 300 }' "$ROOT/ab"
}

# Runs a command so many times; prints how many were lost and made.
each_load() {
    local count=$1 lost=0
    shift
    for _ in $(seq "$count"); do
        timeout 20 "$@" >/dev/null 2>&1 || lost=$((lost + 1))
    done
    echo "$lost $count"
}

# 300 queries by UDP and 300 by TCP from $ROOT/queries; prints how many were lost and made.
dns_load() {
    local mode
    for mode in udp tcp; do
        dnsperf -s "$ADDRESS" -d "$ROOT/queries" -n 1 -c 4 -t 5 -m $mode 2>/dev/null || true
    done | awk '/Queries completed:/ { done += $3 } END { print 600 - done, 600 }'
}

# Writes 5,300 TXT records of 948 bytes: $ROOT/records with a name and quoted strings in each
# line, $ROOT/names for dig, $ROOT/queries for dnsperf, and $ROOT/short, the answers.
make_records() {
    { head -c 5088000 data | tr -d '\n'; echo; } | fold -w 948 |
        sed -E 's/(.{237})(.{237})(.{237})(.{237})/"\1" "\2" "\3" "\4"/' >short
    awk '{ print "t" NR ".example.com. " $0 }' short >records
    awk '{ print $1 " TXT" }' records >names
    head -n 300 names >queries
}

# Makes $ROOT/zone of the records, and $ROOT/expected: a zone transfer, then the answers.
make_zone() {
    make_records
    {
        printf '$TTL 60\n@ SOA ns h 1 2 3 4 5\n@ NS ns\nns A 192.0.2.1\n'
        sed 's/ / TXT /' records
    } >zone
    { sort records; cat short; } >expected
}

# Transfers the zone by TCP, then queries every name by UDP.
transfer_zone() {
    dig "@$ADDRESS" example.com axfr +noall +answer |
        awk '$4 == "TXT" { print $1, $5, $6, $7, $8 }' | sort
    query_names <names
}

# Queries names from standard input, by UDP unless told otherwise.
query_names() {
    dig "@$ADDRESS" -f /dev/stdin +short +notcp +bufsize=1232 "$@"
}

# Prints the port of the kernel's nginx that asks the FastCGI server by the family of $ADDRESS.
front() {
    if [ "$ADDRESS" = "$SERVER_V4" ]; then echo 9001; else echo 9002; fi
}
