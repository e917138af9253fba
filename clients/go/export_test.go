package hearth

// DecodeAnswer reads one frame of the daemon.
func DecodeAnswer(frame []byte) (any, error) { return decodeAnswer(frame) }

// Encode is the request on the wire: the message, and the frames of its pictures.
func (g *Generate) Encode(id string) ([]byte, [][]byte, error) { return encoded(g.encode(id)) }

// Encode is the request on the wire: the message, and the frames of its pictures.
func (q *Tokenize) Encode(id string) ([]byte, [][]byte, error) { return encoded(q.encode(id)) }

func encoded(out *message, err error) ([]byte, [][]byte, error) {
	if err != nil {
		return nil, nil, err
	}
	return out.data, out.frames, nil
}
