// Command hearth-bench is the bench of clients/conformance/BENCH.md: one JSON object on standard
// output.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
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

func main() {
	figures, err := measure(context.Background(), os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	line, err := json.Marshal(figures)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(line))
}

func measure(ctx context.Context, address string) (map[string]float64, error) {
	client, err := open(ctx, address)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	session, err := sessionKB(ctx, address)
	if err != nil {
		return nil, err
	}
	status, err := median(200, func() (float64, error) {
		began := time.Now()
		_, err := client.Status(ctx)
		return time.Since(began).Seconds(), err
	})
	if err != nil {
		return nil, err
	}
	delta, err := median(20, func() (float64, error) {
		began := time.Now()
		deltas, err := read(ctx, client, &hearth.Generate{
			Prompt:    "Once upon a time",
			MaxTokens: hearth.Ptr(256),
			IgnoreEOS: true,
		})
		return time.Since(began).Seconds() / float64(deltas), err
	})
	if err != nil {
		return nil, err
	}
	image, err := median(10, func() (float64, error) {
		seed := make([]byte, 64)
		if _, err := rand.Read(seed); err != nil {
			return 0, err
		}
		pixels := bytes.Repeat(seed, 4*side*side/len(seed))
		began := time.Now()
		picture := hearth.Image{Data: pixels, Encoding: "rgba8", Width: side, Height: side}
		_, err := read(ctx, client, &hearth.Generate{
			Messages:  []hearth.Message{{Role: "user", Parts: []hearth.Part{picture}}},
			MaxTokens: hearth.Ptr(1),
		})
		return time.Since(began).Seconds(), err
	})
	if err != nil {
		return nil, err
	}
	return map[string]float64{
		"status_us": 1e6 * status,
		"delta_us":  1e6 * delta,
		"image_ms":  1e3 * image,
		"rss_kb":    session,
	}, nil
}

func open(ctx context.Context, address string) (*hearth.Client, error) {
	client, err := hearth.Dial(ctx, hearth.Options{Address: address})
	if err != nil {
		return nil, err
	}
	_, err = client.Status(ctx)
	return client, err
}

// sessionKB is the memory that one more session takes.
func sessionKB(ctx context.Context, address string) (float64, error) {
	before, err := residentKB()
	if err != nil {
		return 0, err
	}
	for i := 0; i < sessions; i++ {
		one, err := open(ctx, address)
		if err != nil {
			return 0, err
		}
		defer one.Close()
	}
	after, err := residentKB()
	return (after - before) / sessions, err
}

func read(ctx context.Context, client *hearth.Client, request *hearth.Generate) (int, error) {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return 0, err
	}
	deltas := 0
	for stream.Next() {
		deltas++
	}
	return deltas, stream.Err()
}

func median(count int, task func() (float64, error)) (float64, error) {
	warmUp := count/10 + 1
	all := make([]float64, warmUp+count)
	for i := range all {
		var err error
		if all[i], err = task(); err != nil {
			return 0, err
		}
	}
	all = all[warmUp:]
	sort.Float64s(all)
	return (all[(count-1)/2] + all[count/2]) / 2, nil
}

func residentKB() (float64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(`VmRSS:\s+(\d+)`).FindSubmatch(status)
	if found == nil {
		return 0, fmt.Errorf("no VmRSS")
	}
	return strconv.ParseFloat(string(found[1]), 64)
}
