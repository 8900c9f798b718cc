// A load generator and a backend that take little of what a server in Python takes; bench/load.py builds it with Go.
//
//	native load PATH PORT CONNECTIONS SECONDS METHOD BODY_FILE [HEADER]...   as bench/generator.py
//	native sink RECORDS MODE                                                 as bench/sink.py, without `latency`;
//	                                                                         `bulk`: as Dapr's bulk subscriptions
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	if os.Args[1] == "load" {
		load(os.Args[2:])
	} else {
		sink(number(os.Args[2]), os.Args[3])
	}
}

// message is one request or response.
type message struct {
	first string
	body  []byte
}

// read returns the next message of a connection; the body has a Content-Length.
func read(reader *bufio.Reader, body []byte) (message, error) {
	line, err := reader.ReadSlice('\n')
	if err != nil {
		return message{}, err
	}
	found, length := message{first: string(line)}, 0
	for {
		if line, err = reader.ReadSlice('\n'); err != nil {
			return found, err
		}
		if len(line) <= 2 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		if bytes.EqualFold(name, []byte("content-length")) {
			length = number(string(bytes.TrimSpace(value)))
		} else if bytes.EqualFold(name, []byte("transfer-encoding")) {
			return found, fmt.Errorf("a chunked body is not expected")
		}
	}
	if cap(body) < length {
		body = make([]byte, length)
	}
	found.body = body[:length]
	_, err = io.ReadFull(reader, found.body)
	return found, err
}

// load -------------------------------------------------------------------------------------------------------------

const (
	pause    = time.Second
	patience = 60 * time.Second // for the last response
)

// client is what one connection found.
type client struct {
	times           []time.Duration
	errors, refused int
	first           time.Time
}

func load(words []string) {
	path, port, method, file := words[0], words[1], words[4], words[5]
	body, err := os.ReadFile(file)
	check(err)
	lines := append([]string{method + " " + path + " HTTP/1.1", "Host: 127.0.0.1:" + port}, words[6:]...)
	lines = append(lines, fmt.Sprintf("Content-Length: %d", len(body)), "", "")
	request := append([]byte(strings.Join(lines, "\r\n")), body...)
	start := time.Now()
	end := start.Add(time.Duration(number(words[3])) * time.Second)
	clients := make([]client, number(words[2]))
	var running sync.WaitGroup
	for n := range clients {
		running.Add(1)
		go func() {
			defer running.Done()
			clients[n].run("127.0.0.1:"+port, request, end)
		}()
	}
	running.Wait()
	report(clients, start)
}

// run sends the request again and again until the end.
func (one *client) run(address string, request []byte, end time.Time) {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		one.errors++
		return
	}
	defer connection.Close()
	check(connection.SetDeadline(end.Add(patience)))
	reader := bufio.NewReaderSize(connection, 16384)
	var body []byte
	for now := time.Now(); now.Before(end); {
		sent := now
		if _, err = connection.Write(request); err != nil {
			one.errors++
			return
		}
		response, err := read(reader, body)
		if err != nil {
			one.errors++
			return
		}
		body, now = response.body, time.Now()
		if one.first.IsZero() {
			one.first = now
		}
		switch status := response.first[9:12]; status {
		case "503":
			one.refused++
			time.Sleep(pause)
			now = time.Now()
		default:
			one.times = append(one.times, now.Sub(sent))
			if status != "200" && status != "204" {
				one.errors++
			}
		}
	}
}

func report(clients []client, start time.Time) {
	var times []time.Duration
	var first time.Duration
	errors, refused, fewest := 0, 0, len(clients[0].times)
	for _, one := range clients {
		fewest = min(fewest, len(one.times))
		if one.first.IsZero() { // no response until the end
			one.first = time.Now()
		}
		times = append(times, one.times...)
		errors, refused = errors+one.errors, refused+one.refused
		first = max(first, one.first.Sub(start))
	}
	sort.Slice(times, func(a, b int) bool { return times[a] < times[b] })
	at := func(share float64) float64 {
		if len(times) == 0 {
			return 0
		}
		return milliseconds(times[min(len(times)-1, int(share*float64(len(times))))])
	}
	fmt.Printf(`{"requests": %d, "errors": %d, "refused": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, `+
		`"longest_ms": %f, "first_ms": %f, "least": %f}`+"\n",
		len(times), errors, refused, time.Since(start).Seconds(), at(0.5), at(0.99), at(1), milliseconds(first),
		float64(fewest*len(clients))/float64(max(1, len(times))))
}

// sink -------------------------------------------------------------------------------------------------------------

var (
	mark  = []byte(`"offset":`)
	entry = []byte(`"entryId":"`)
)

// count holds the records so far.
type count struct {
	sync.Mutex
	expected, records int
	first             time.Time
	used              float64
}

func sink(expected int, mode string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	found := &count{expected: expected}
	for {
		connection, err := listener.Accept()
		check(err)
		go found.serve(connection, mode)
	}
}

func (found *count) serve(connection net.Conn, mode string) {
	defer connection.Close()
	reader := bufio.NewReaderSize(connection, 65536)
	var body []byte
	for {
		request, err := read(reader, body)
		if err != nil {
			return
		}
		body = request.body
		reply, records := "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1
		if len(body) == 0 { // a question about the application, not a record
			reply, records = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 0
		} else if mode == "bulk" {
			reply, records = statuses(body)
		} else if mode != "single" {
			records = bytes.Count(body, mark)
		}
		if mode == "results" && records > 0 {
			results := "[" + strings.Repeat(`{"processed":true},`, records-1) + `{"processed":true}]`
			reply = fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(results), results)
		}
		found.add(records)
		if _, err = connection.Write([]byte(reply)); err != nil {
			return
		}
	}
}

// statuses returns the response that takes each entry of Dapr's bulk request, and how many there are.
func statuses(body []byte) (string, int) {
	parts := bytes.Split(body, entry)[1:]
	var found strings.Builder
	for n, part := range parts {
		id, _, _ := bytes.Cut(part, []byte{'"'})
		if n > 0 {
			found.WriteByte(',')
		}
		found.WriteString(`{"entryId":"`)
		found.Write(id)
		found.WriteString(`","status":"SUCCESS"}`)
	}
	text := `{"statuses":[` + found.String() + `]}`
	head := "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
	return fmt.Sprintf(head, len(text), text), len(parts)
}

func (found *count) add(records int) {
	found.Lock()
	defer found.Unlock()
	if records == 0 {
		return
	}
	if found.first.IsZero() {
		found.first, found.used = time.Now(), processorSeconds()
		fmt.Println("first")
	}
	before := found.records
	found.records += records
	if before < found.expected && found.records >= found.expected {
		seconds := time.Since(found.first).Seconds()
		share := (processorSeconds() - found.used) / seconds
		fmt.Printf(`{"records": %d, "seconds": %f, "load": %f}`+"\n", found.records, seconds, share)
	}
}

// ------------------------------------------------------------------------------------------------------------------

func processorSeconds() float64 {
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return float64(used.Utime.Sec+used.Stime.Sec) + float64(used.Utime.Usec+used.Stime.Usec)/1e6
}

func milliseconds(time time.Duration) float64 {
	return float64(time.Microseconds()) / 1000
}

func number(text string) int {
	found, err := strconv.Atoi(text)
	check(err)
	return found
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
