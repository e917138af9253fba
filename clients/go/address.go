package hearth

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const (
	maxPathBytes = 107
	systemPath   = "/run/hearth/hearth.sock"
	scheme       = "ipc://"
)

// socketPath is the path that an address names: a path or ipc://PATH, else $HEARTH_SOCKET, else the
// first agreed place with a socket, and the user's own where there is none yet.
func socketPath(address string) (string, error) {
	if address == "" {
		address = os.Getenv("HEARTH_SOCKET")
	}
	if address == "" {
		address = systemPath
		if folder := os.Getenv("XDG_RUNTIME_DIR"); folder != "" {
			own := filepath.Join(folder, "hearth", "hearth.sock")
			if mayExist(own) || !mayExist(systemPath) {
				address = own
			}
		}
	}
	path := strings.TrimPrefix(address, scheme)
	if strings.Contains(path, "://") {
		return "", failure(InvalidValue, "Address", nil,
			"%s is not the path of a local socket: give a path or ipc://PATH", address)
	}
	if len(path) > maxPathBytes {
		return "", failure(InvalidValue, "Address", nil,
			"the socket path %s has %d bytes, at most %d are possible: choose a shorter folder",
			path, len(path), maxPathBytes)
	}
	return path, nil
}

// mayExist tells whether a path exists, or may exist in a folder that this user cannot read.
func mayExist(path string) bool {
	_, err := os.Stat(path)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// absent tells whether a dial failed because nobody listens.
func absent(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) ||
		errors.Is(err, syscall.ENOTDIR)
}
