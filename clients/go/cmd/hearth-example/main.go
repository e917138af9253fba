// Command hearth-example asks one question: it is the program of the README.
package main

import (
	"context"
	"fmt"
	"log"

	"hearth"
)

func main() {
	ctx := context.Background()
	client, err := hearth.Dial(ctx, hearth.Options{}) // $HEARTH_SOCKET, or the agreed place
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Generate(ctx, &hearth.Generate{
		Messages:  []hearth.Message{{Role: "user", Text: "Turn on the desk lamp"}},
		MaxTokens: hearth.Ptr(64),
	})
	if err != nil {
		log.Fatal(err)
	}
	for stream.Next() {
		fmt.Print(stream.Delta().Text)
	}
	fmt.Println()
	if err := stream.Err(); err != nil {
		log.Fatal(err)
	}
}
