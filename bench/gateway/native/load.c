/* Clients of one proxy: connections that each send a request as soon as the last response is complete.
 *
 *     load PORT CONNECTIONS WARM_S SECONDS SPREAD_MS EVENTS FILE
 *
 * FILE holds HTTP requests, each after its length (4 bytes, little-endian); connections take them in turn. The program
 * connects, warms up for WARM_S, waits for all responses, prints "ready", waits for a line of input, sends for SECONDS
 * (0: one request each), waits for the responses in flight, and prints one line of JSON. The first requests are spread
 * over SPREAD_MS. A response is right if its status is 200 and it has EVENTS server-sent events (0 if not streamed).
 * fallback/load.py does the same in Python.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READY = 256, MAX_HEAD = 8192, BUFFER = 1 << 18, MAX_ERRORS = 1000, TIMEOUT_S = 20 };

struct request { const char *text; size_t size; };

enum state { HEAD, SIZED, CHUNKED };           /* of a response: before its body, with content-length, chunked */

struct client {
    int fd;
    const struct request *request;               /* NULL: none in flight */
    size_t sent;
    uint64_t begun, first;                       /* ns: when it was sent, when the first event arrived (0: not yet) */
    enum state state;
    bool right;
    char head[MAX_HEAD + 1];
    size_t head_used;
    size_t left;                                 /* SIZED: bytes of the body still to come */
    long events;                                 /* CHUNKED: server-sent events so far */
    char tail[7];                                /* CHUNKED: the last bytes */
};

struct samples { uint32_t *us10; size_t used, room; };   /* tenths of microseconds */

static struct sockaddr_in address = {.sin_family = AF_INET};
static struct client *clients;
static struct request *requests;
static size_t request_count, next_request;
static int poll_fd, connections, open_requests;
static long done, wrong, events_seen, events_expected;
static uint64_t stop_at;                         /* no new request after this */
static struct samples whole_times, first_times;
static char first_error[200];                      /* start of the first wrong response */

static void fail(const char *what) { fprintf(stderr, "load: %s: %s\n", what, strerror(errno)); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void note(struct samples *samples, uint64_t ns) {
    if (samples->used == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 1 << 16;
        if (!(samples->us10 = realloc(samples->us10, samples->room * sizeof *samples->us10))) fail("memory");
    }
    samples->us10[samples->used++] = ns / 100;
}

/* Connections */

static void connect_client(struct client *client) {
    client->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (client->fd < 0 || connect(client->fd, (struct sockaddr *)&address, sizeof address)) fail("cannot connect");
    setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = client};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, client->fd, &event)) fail("epoll_ctl");
}

static void write_client(struct client *client) {
    while (client->request && client->sent < client->request->size) {
        const char *from = client->request->text + client->sent;
        ssize_t sent = send(client->fd, from, client->request->size - client->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) return;                    /* full, or closed: the next read reports it */
        client->sent += sent;
    }
}

static void begin(struct client *client) {
    client->request = &requests[next_request++ % request_count];
    client->sent = client->first = client->head_used = client->events = 0;
    client->state = HEAD;
    memset(client->tail, 0, sizeof client->tail);
    client->begun = now_ns();
    open_requests++;
    write_client(client);
}

/* Responses */

static void report_error(const char *text, size_t size) {
    wrong++;
    if (!first_error[0]) snprintf(first_error, sizeof first_error, "%.*s", (int)(size < 150 ? size : 150), text);
    if (wrong > MAX_ERRORS) fprintf(stderr, "load: too many wrong responses: %s\n", first_error), exit(1);
}

static void end(struct client *client) {
    uint64_t now = now_ns();
    if (!client->right) report_error(client->head, client->head_used);
    else if (client->events != events_expected) report_error("a response with another number of events", 40);
    done++;
    events_seen += client->events;
    note(&whole_times, now - client->begun);
    if (client->first) note(&first_times, client->first - client->begun);
    client->request = NULL;
    open_requests--;
    if (now < stop_at) begin(client);
}

static void lose(struct client *client) {
    report_error("the connection was closed before the end of a response", 54);
    close(client->fd);
    client->request = NULL;
    open_requests--;
    connect_client(client);
    if (now_ns() < stop_at) begin(client);
}

/* Server-sent events end with an empty line; HTTP's own lines end with CR LF, so "\n\n" is unambiguous. */
static void read_chunks(struct client *client, const char *text, size_t size) {
    const char *end_of_text = text + size;
    char before = client->tail[6];
    for (const char *at = text; (at = memchr(at, '\n', end_of_text - at)); at++) {
        if ((at == text ? before : at[-1]) != '\n') continue;
        if (!client->events++) client->first = now_ns();
    }
    size_t kept = size < 7 ? size : 7;
    memmove(client->tail, client->tail + kept, 7 - kept);
    memcpy(client->tail + 7 - kept, end_of_text - kept, kept);
    if (!memcmp(client->tail, "\r\n0\r\n\r\n", 7)) end(client);
}

static void read_body(struct client *client, const char *text, size_t size) {
    if (client->state == CHUNKED) {
        read_chunks(client, text, size);
    } else {
        client->left -= size < client->left ? size : client->left;
        if (!client->left) end(client);
    }
}

static void read_head(struct client *client, const char *text, size_t size) {
    size_t before = client->head_used;
    size_t taken = size < MAX_HEAD - before ? size : MAX_HEAD - before;
    memcpy(client->head + before, text, taken);
    client->head_used += taken;
    char *last = memmem(client->head, client->head_used, "\r\n\r\n", 4);
    if (!last) return client->head_used == MAX_HEAD ? lose(client) : (void)0;
    client->right = client->head_used > 12 && !memcmp(client->head + 8, " 200", 4);
    client->state = CHUNKED;
    for (char *line = client->head; line < last; line = (char *)memmem(line, last + 2 - line, "\r\n", 2) + 2)
        if (!strncasecmp(line, "content-length:", 15)) {
            client->state = SIZED;
            client->left = strtoul(line + 15, NULL, 10);
        }
    size_t head = last + 4 - client->head - before;          /* of `text` */
    read_body(client, text + head, size - head);
}

static void read_client(struct client *client) {
    static char buffer[BUFFER];
    for (;;) {
        ssize_t got = recv(client->fd, buffer, BUFFER, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) return;
        if (!client->request) {                  /* closed between two requests, or surplus data */
            if (got <= 0) close(client->fd), connect_client(client);
            else report_error(buffer, got);
            return;
        }
        if (got <= 0) return lose(client);
        if (client->state == HEAD) read_head(client, buffer, got);
        else read_body(client, buffer, got);
        if (got < BUFFER) return;                /* edge-triggered: everything was read */
    }
}

/* A run */

static void serve(int timeout_ms) {
    struct epoll_event ready[READY];
    int found = epoll_wait(poll_fd, ready, READY, timeout_ms);
    for (int at = 0; at < found; at++) {
        struct client *client = ready[at].data.ptr;
        if (ready[at].events & EPOLLOUT) write_client(client);
        if (ready[at].events & ~EPOLLOUT) read_client(client);
    }
}

static double run(double seconds, double spread_ms) {
    uint64_t start = now_ns(), spread = (uint64_t)(spread_ms * 1e6);
    uint64_t give_up = start + (uint64_t)((seconds + TIMEOUT_S) * 1e9);
    stop_at = start + (uint64_t)(seconds * 1e9);
    done = wrong = events_seen = 0;
    whole_times.used = first_times.used = first_error[0] = 0;
    for (int number = 0; number < connections; number++) {
        while (now_ns() < start + spread * number / connections) serve(0);
        begin(&clients[number]);
    }
    while (open_requests) {
        serve(1000);
        if (now_ns() > give_up) fprintf(stderr, "load: %d requests got no answer\n", open_requests), exit(1);
    }
    return (now_ns() - start) / 1e9;
}

static int smaller_first(const void *a, const void *b) {
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

static void print_times(const char *name, struct samples *samples) {
    qsort(samples->us10, samples->used, sizeof *samples->us10, smaller_first);
    size_t n = samples->used;
    double p50 = n ? samples->us10[n / 2] / 10.0 : 0, p99 = n ? samples->us10[n * 99 / 100] / 10.0 : 0;
    printf(", \"%s_p50_us\": %.1f, \"%s_p99_us\": %.1f", name, p50, name, p99);
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void read_requests(const char *name) {
    FILE *file = fopen(name, "rb");
    if (!file) fail(name);
    for (uint32_t size; fread(&size, sizeof size, 1, file) == 1;) {
        char *text = malloc(size);
        if (!text || fread(text, 1, size, file) != size) fail(name);
        requests = realloc(requests, (request_count + 1) * sizeof *requests);
        requests[request_count++] = (struct request){text, size};
    }
    fclose(file);
}

int main(int count, char **words) {
    if (count != 8) return fprintf(stderr, "load PORT CONNECTIONS WARM_S SECONDS SPREAD_MS EVENTS FILE\n"), 2;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(atoi(words[1]));
    connections = atoi(words[2]);
    double warm = atof(words[3]), seconds = atof(words[4]), spread_ms = atof(words[5]);
    events_expected = atol(words[6]);
    read_requests(words[7]);
    if (!request_count || connections < 1) return fprintf(stderr, "load: nothing to send\n"), 2;
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    clients = calloc(connections, sizeof *clients);
    for (int number = 0; number < connections; number++) connect_client(&clients[number]);
    if (warm > 0) run(warm, spread_ms);
    printf("ready\n");
    fflush(stdout);
    if (getchar() == EOF) return 1;
    double before = cpu_s(), took = run(seconds, spread_ms);
    printf("{\"requests\": %ld, \"errors\": %ld, \"events\": %ld, \"seconds\": %.6f, \"cpu_s\": %.6f", done, wrong,
           events_seen, took, cpu_s() - before);
    print_times("latency", &whole_times);
    print_times("first", &first_times);
    for (char *c = first_error; *c; c++) if (*c < ' ' || *c == '"' || *c == '\\') *c = ' ';
    printf(", \"first_error\": \"%s\"}\n", first_error);
    return 0;
}
