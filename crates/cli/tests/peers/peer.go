// Peer for the tests: `peer echo ADDRESS` is an echo server, `peer fetch URL` posts
// bodies of growing size and checks the responses.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func echo(address string) {
	listener, err := net.Listen("tcp", address)
	check(err)
	fmt.Println("ready")
	for {
		stream, err := listener.Accept()
		check(err)
		go func() {
			defer stream.Close()
			io.Copy(stream, stream)
		}()
	}
}

func fetch(url string) {
	client := http.Client{Timeout: 20 * time.Second}
	for size := 1; size <= 1<<20; size *= 4 {
		sent := bytes.Repeat([]byte{byte(size % 251), 7}, size)
		response, err := client.Post(url, "application/octet-stream", bytes.NewReader(sent))
		check(err)
		received, err := io.ReadAll(response.Body)
		check(err)
		check(response.Body.Close())
		if !bytes.Equal(sent, received) {
			check(fmt.Errorf("%d bytes became %d others", len(sent), len(received)))
		}
	}
}

func main() {
	switch os.Args[1] {
	case "echo":
		echo(os.Args[2])
	case "fetch":
		fetch(os.Args[2])
	}
}
