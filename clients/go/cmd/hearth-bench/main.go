// Command hearth-bench is the bench of clients/conformance/BENCH.md: one JSON object on standard
// output.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"regexp"
	"sort"
	"strconv"
	"time"

	"hearth"
)

const (
	side     = 512
	sessions = 32
)

var ctx = context.Background()

func main() {
	client := open()
	defer client.Close()
	session := sessionKB()
	status := median(200, func() float64 {
		began := time.Now()
		must(client.Status(ctx))
		return time.Since(began).Seconds()
	})
	delta := median(20, func() float64 {
		began := time.Now()
		request := hearth.Generate{Prompt: "Once upon a time", MaxTokens: hearth.Ptr(256), IgnoreEOS: true}
		deltas := read(client, &request)
		return time.Since(began).Seconds() / float64(deltas)
	})
	image := median(10, func() float64 {
		seed := make([]byte, 64)
		must(rand.Read(seed))
		pixels := bytes.Repeat(seed, 4*side*side/len(seed))
		began := time.Now()
		picture := hearth.Image{Data: pixels, Encoding: "rgba8", Width: side, Height: side}
		turns := []hearth.Message{{Role: "user", Parts: []hearth.Part{picture}}}
		read(client, &hearth.Generate{Messages: turns, MaxTokens: hearth.Ptr(1)})
		return time.Since(began).Seconds()
	})
	fmt.Printf(
		"{\"status_us\": %.3f, \"delta_us\": %.3f, \"image_ms\": %.4f, \"rss_kb\": %.2f}\n",
		1e6*status, 1e6*delta, 1e3*image, session,
	)
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func open() *hearth.Client {
	client := must(hearth.Dial(ctx, hearth.Options{Address: os.Args[1]}))
	must(client.Status(ctx))
	return client
}

// read returns the number of deltas of a reply.
func read(client *hearth.Client, request *hearth.Generate) int {
	stream := must(client.Generate(ctx, request))
	deltas := 0
	for stream.Next() {
		deltas++
	}
	return must(deltas, stream.Err())
}

// sessionKB returns the memory that one more session takes.
func sessionKB() float64 {
	before := residentKB()
	for i := 0; i < sessions; i++ {
		defer open().Close()
	}
	return (residentKB() - before) / sessions
}

func median(count int, task func() float64) float64 {
	warmUp := count/10 + 1
	all := make([]float64, warmUp+count)
	for i := range all {
		all[i] = task()
	}
	all = all[warmUp:]
	sort.Float64s(all)
	return (all[(count-1)/2] + all[count/2]) / 2
}

func residentKB() float64 {
	status := must(os.ReadFile("/proc/self/status"))
	found := regexp.MustCompile(`VmRSS:\s+(\d+)`).FindSubmatch(status)
	return must(strconv.ParseFloat(string(found[1]), 64))
}
