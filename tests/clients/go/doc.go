// Package clients holds what programs with etcd's Go client see of a server.
package clients
