/* Copies rows of caches to and from an arena, on a thread that never takes the interpreter's lock;
 * small jobs at once.
 *
 * A payload is, piece after piece of a group, that piece's rows; it lies in the arena in extents,
 * which cut it anywhere. What the methods promise is written in `native_queue.py`.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* A range of bytes in every row of a group, as Python packs it. */
typedef struct {
    int64_t address; /* of row 0 */
    int64_t row_stride;
    int64_t row_bytes;
} Piece;

typedef struct {
    Piece *pieces;
    size_t num_pieces;
    Py_ssize_t num_rows;
    size_t row_bytes; /* over all pieces */
} Group;

typedef struct {
    char *memory;
    size_t num_bytes;
} Part;

/* One chunk: what lies where. */
typedef struct {
    const Group *group;
    Py_ssize_t *rows; /* of the caches, in the order of the payload's */
    size_t num_rows;
    size_t first_row; /* rows of the payload before the first that is copied */
    size_t payload_rows;
    Part *parts;
} Copy;

/* Chunks that are copied and reported together. */
typedef struct Job {
    struct Job *next;
    long long id;
    int is_load;
    Copy *copies;
    size_t num_copies;
    size_t num_bytes;
    double seconds;
} Job;

typedef struct {
    Job *first;
    Job *last;
} Jobs;

/* What the mutex guards: the lists, and whether it is closed. Everything else stays as it was. */
typedef struct {
    PyObject_HEAD
    Py_buffer arena;
    Py_ssize_t page_bytes;
    Py_ssize_t at_once_bytes; /* jobs of so many are copied when they are submitted */
    Group *groups;
    Py_ssize_t num_groups;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    Jobs loads;
    Jobs stores;
    Jobs done;
    atomic_bool is_closed; /* read without the mutex, too */
    int num_threads;       /* in `work` */
} Queue;

/* --- lists of jobs -------------------------------------------------------------------------- */

static void append(Jobs *jobs, Job *job)
{
    job->next = NULL;
    if (jobs->last)
        jobs->last->next = job;
    else
        jobs->first = job;
    jobs->last = job;
}

static Job *pop(Jobs *jobs)
{
    Job *job = jobs->first;

    if (job)
        jobs->first = job->next;
    if (!jobs->first)
        jobs->last = NULL;
    return job;
}

static void free_job(Job *job)
{
    for (size_t i = 0; i < job->num_copies; i++) {
        PyMem_Free(job->copies[i].rows);
        PyMem_Free(job->copies[i].parts);
    }
    PyMem_Free(job->copies);
    PyMem_Free(job);
}

static void free_jobs(Jobs *jobs)
{
    Job *job;

    while ((job = pop(jobs)))
        free_job(job);
}

/* --- bytes, without the interpreter's lock -------------------------------------------------- */

/* A place in a payload, which moves towards its end. */
typedef struct {
    const Part *part;
    size_t offset;
} Place;

/* The memory at a place, at most `num_bytes` of it and at least one; the place is behind it then. */
static char *take_memory(Place *place, size_t *num_bytes)
{
    char *memory;

    while (place->offset == place->part->num_bytes) {
        place->part++;
        place->offset = 0;
    }
    if (*num_bytes > place->part->num_bytes - place->offset)
        *num_bytes = place->part->num_bytes - place->offset;
    memory = place->part->memory + place->offset;
    place->offset += *num_bytes;
    return memory;
}

static void skip(Place *place, size_t num_bytes)
{
    while (num_bytes > 0) {
        size_t count = num_bytes;
        take_memory(place, &count);
        num_bytes -= count;
    }
}

static void move_row(char *row, Place *place, size_t num_bytes, bool is_load)
{
    while (num_bytes > 0) {
        size_t count = num_bytes;
        char *payload = take_memory(place, &count);
        memcpy(is_load ? row : payload, is_load ? payload : row, count);
        row += count;
        num_bytes -= count;
    }
}

static void move_chunk(const Copy *copy, bool is_load)
{
    size_t rows_behind = copy->payload_rows - copy->first_row - copy->num_rows;
    Place place = {copy->parts, 0};

    for (size_t i = 0; copy->num_rows > 0 && i < copy->group->num_pieces; i++) {
        const Piece *piece = &copy->group->pieces[i];
        char *base = (char *)(intptr_t)piece->address;
        size_t row_bytes = (size_t)piece->row_bytes;

        skip(&place, copy->first_row * row_bytes);
        for (size_t j = 0; j < copy->num_rows; j++)
            move_row(base + copy->rows[j] * piece->row_stride, &place, row_bytes, is_load);
        skip(&place, rows_behind * row_bytes);
    }
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void run_job(Job *job)
{
    double start = now();

    for (size_t i = 0; i < job->num_copies; i++)
        move_chunk(&job->copies[i], job->is_load);
    job->seconds = now() - start;
}

/* The next job, loads first; NULL: it is closed. Waits, with the mutex held. */
static Job *next_job(Queue *queue)
{
    while (!queue->is_closed && !queue->loads.first && !queue->stores.first)
        pthread_cond_wait(&queue->changed, &queue->mutex);
    if (queue->is_closed)
        return NULL;
    return pop(queue->loads.first ? &queue->loads : &queue->stores);
}

static void run_jobs(Queue *queue)
{
    Job *job;

    pthread_mutex_lock(&queue->mutex);
    queue->num_threads++;
    while ((job = next_job(queue))) {
        pthread_mutex_unlock(&queue->mutex);
        run_job(job);
        pthread_mutex_lock(&queue->mutex);
        append(&queue->done, job);
    }
    queue->num_threads--;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}

static void stop(Queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    queue->is_closed = true;
    pthread_cond_broadcast(&queue->changed);
    while (queue->num_threads > 0)
        pthread_cond_wait(&queue->changed, &queue->mutex);
    pthread_mutex_unlock(&queue->mutex);
}

/* --- arguments ------------------------------------------------------------------------------ */

/* Memory for things, and a byte, so that none is no failure; NULL: with an exception. */
static void *room_for(size_t count, size_t size)
{
    void *memory = PyMem_Calloc(count * size + 1, 1);

    return memory ? memory : PyErr_NoMemory();
}

static bool is_tuple(PyObject *object)
{
    if (PyTuple_Check(object))
        return true;
    PyErr_SetString(PyExc_TypeError, "a tuple was expected");
    return false;
}

static bool read_group(Group *group, PyObject *object)
{
    const char *packed;
    Py_ssize_t num_bytes;
    bool is_sound;

    if (!is_tuple(object) ||
        !PyArg_ParseTuple(object, "y#n", &packed, &num_bytes, &group->num_rows))
        return false;
    if (!(group->pieces = room_for((size_t)num_bytes, 1)))
        return false;
    memcpy(group->pieces, packed, (size_t)num_bytes);
    group->num_pieces = (size_t)num_bytes / sizeof(Piece);
    is_sound = num_bytes > 0 && (size_t)num_bytes % sizeof(Piece) == 0;
    for (size_t i = 0; i < group->num_pieces; i++) {
        const Piece *piece = &group->pieces[i];
        is_sound &= piece->address > 0 && piece->row_stride >= 0 && piece->row_bytes > 0;
        group->row_bytes += (size_t)piece->row_bytes;
    }
    if (!is_sound)
        PyErr_SetString(PyExc_ValueError, "these are no pieces of a group");
    return is_sound;
}

static bool read_groups(Queue *queue, PyObject *groups)
{
    Py_ssize_t count = PyTuple_Size(groups);

    if (!(queue->groups = room_for((size_t)count, sizeof *queue->groups)))
        return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        queue->num_groups++;
        if (!read_group(&queue->groups[i], PyTuple_GetItem(groups, i)))
            return false;
    }
    return true;
}

static bool read_rows(Copy *copy, PyObject *rows)
{
    copy->num_rows = (size_t)PyTuple_Size(rows);
    if (!(copy->rows = room_for(copy->num_rows, sizeof *copy->rows)))
        return false;
    for (size_t i = 0; i < copy->num_rows; i++) {
        Py_ssize_t row = PyLong_AsSsize_t(PyTuple_GetItem(rows, (Py_ssize_t)i));
        if (row == -1 && PyErr_Occurred())
            return false;
        if (row < 0 || row >= copy->group->num_rows) {
            PyErr_Format(PyExc_IndexError, "row %zd of %zd", row, copy->group->num_rows);
            return false;
        }
        copy->rows[i] = row;
    }
    return true;
}

/* Whether a payload has whole rows, and those that are asked for: for a store, no others. */
static bool read_payload(Copy *copy, Py_ssize_t num_bytes, Py_ssize_t first_row, bool is_load)
{
    size_t size = num_bytes < 0 ? 0 : (size_t)num_bytes;
    size_t rows = size / copy->group->row_bytes, first = first_row < 0 ? 0 : (size_t)first_row;
    bool fits = first <= rows && copy->num_rows <= rows - first;

    copy->payload_rows = rows;
    copy->first_row = first;
    if (num_bytes >= 0 && first_row >= 0 && size % copy->group->row_bytes == 0 && fits &&
        (is_load || copy->num_rows == rows))
        return true;
    PyErr_Format(PyExc_ValueError, "payload of %zd bytes for %zu rows of %zu bytes from row %zd on",
                 num_bytes, copy->num_rows, copy->group->row_bytes, first_row);
    return false;
}

static bool read_extent(const Queue *queue, Part *part, PyObject *extent)
{
    Py_ssize_t first_page, num_pages, pages = queue->arena.len / queue->page_bytes;

    if (!is_tuple(extent) || !PyArg_ParseTuple(extent, "nn", &first_page, &num_pages))
        return false;
    if (first_page < 0 || num_pages < 0 || first_page > pages || num_pages > pages - first_page) {
        PyErr_Format(PyExc_IndexError, "pages %zd and %zd more of %zd", first_page, num_pages,
                     pages);
        return false;
    }
    part->memory = (char *)queue->arena.buf + first_page * queue->page_bytes;
    part->num_bytes = (size_t)(num_pages * queue->page_bytes);
    return true;
}

static bool read_extents(const Queue *queue, Copy *copy, PyObject *extents, Py_ssize_t num_bytes)
{
    Py_ssize_t count = PyTuple_Size(extents);
    size_t room = 0;

    if (!(copy->parts = room_for((size_t)count, sizeof *copy->parts)))
        return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!read_extent(queue, &copy->parts[i], PyTuple_GetItem(extents, i)))
            return false;
        room += copy->parts[i].num_bytes;
    }
    if (room >= (size_t)num_bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "room for %zu bytes, the payload has %zd", room, num_bytes);
    return false;
}

static bool read_copy(const Queue *queue, Job *job, PyObject *chunk)
{
    Copy *copy = &job->copies[job->num_copies++];
    PyObject *extents, *rows;
    Py_ssize_t group, num_bytes, first_row;

    if (!is_tuple(chunk) ||
        !PyArg_ParseTuple(chunk, "nO!nO!n", &group, &PyTuple_Type, &extents, &num_bytes,
                          &PyTuple_Type, &rows, &first_row))
        return false;
    if (group < 0 || group >= queue->num_groups) {
        PyErr_Format(PyExc_IndexError, "group %zd of %zd", group, queue->num_groups);
        return false;
    }
    copy->group = &queue->groups[group];
    job->num_bytes += (size_t)num_bytes;
    return read_rows(copy, rows) && read_payload(copy, num_bytes, first_row, job->is_load) &&
           read_extents(queue, copy, extents, num_bytes);
}

/* A job from its arguments; NULL: with an exception. */
static Job *read_job(const Queue *queue, PyObject *args)
{
    PyObject *chunks;
    Job *job = room_for(1, sizeof *job);
    bool is_sound = job && PyArg_ParseTuple(args, "LpO!", &job->id, &job->is_load, &PyTuple_Type,
                                            &chunks);
    Py_ssize_t count = is_sound ? PyTuple_Size(chunks) : 0;

    if (is_sound)
        is_sound = (job->copies = room_for((size_t)count, sizeof *job->copies));
    for (Py_ssize_t i = 0; is_sound && i < count; i++)
        is_sound = read_copy(queue, job, PyTuple_GetItem(chunks, i));
    if (is_sound)
        return job;
    if (job)
        free_job(job);
    return NULL;
}

/* --- Python --------------------------------------------------------------------------------- */

static PyObject *queue_submit(PyObject *self, PyObject *args)
{
    Queue *queue = (Queue *)self;
    Job *job;
    bool is_small;

    if (queue->is_closed)
        return PyErr_Format(PyExc_ValueError, "the queue is closed");
    if (!(job = read_job(queue, args)))
        return NULL;
    is_small = job->num_bytes <= (size_t)queue->at_once_bytes;
    if (is_small)
        run_job(job);
    pthread_mutex_lock(&queue->mutex);
    append(is_small ? &queue->done : job->is_load ? &queue->loads : &queue->stores, job);
    if (!is_small)
        pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
    Py_RETURN_NONE;
}

static PyObject *queue_take(PyObject *self, PyObject *unused)
{
    Queue *queue = (Queue *)self;
    PyObject *reports = PyList_New(0), *report;
    Jobs done;

    (void)unused;
    pthread_mutex_lock(&queue->mutex);
    done = queue->done;
    queue->done = (Jobs){0};
    pthread_mutex_unlock(&queue->mutex);
    for (Job *job = done.first; job && reports; job = job->next) {
        report = Py_BuildValue("Lnd", job->id, (Py_ssize_t)job->num_bytes, job->seconds);
        if (!report || PyList_Append(reports, report) < 0)
            Py_CLEAR(reports);
        Py_XDECREF(report);
    }
    free_jobs(&done);
    return reports;
}

static PyObject *queue_work(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    run_jobs((Queue *)self);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void let_go(Queue *queue)
{
    free_jobs(&queue->loads);
    free_jobs(&queue->stores);
    free_jobs(&queue->done);
    if (queue->arena.obj)
        PyBuffer_Release(&queue->arena);
}

static PyObject *queue_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    stop((Queue *)self);
    Py_END_ALLOW_THREADS
    let_go((Queue *)self);
    Py_RETURN_NONE;
}

static void queue_dealloc(PyObject *self)
{
    Queue *queue = (Queue *)self;
    PyTypeObject *type = Py_TYPE(self);

    let_go(queue);
    for (Py_ssize_t i = 0; i < queue->num_groups; i++)
        PyMem_Free(queue->groups[i].pieces);
    PyMem_Free(queue->groups);
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->mutex);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *options)
{
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    Queue *queue = (Queue *)self;
    PyObject *arena, *groups;

    (void)options;
    if (!self)
        return NULL;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->changed, NULL);
    if (PyArg_ParseTuple(args, "OnO!n", &arena, &queue->page_bytes, &PyTuple_Type, &groups,
                         &queue->at_once_bytes) &&
        PyObject_GetBuffer(arena, &queue->arena, PyBUF_WRITABLE) == 0 &&
        read_groups(queue, groups)) {
        if (queue->page_bytes > 0 && queue->at_once_bytes >= 0)
            return self;
        PyErr_SetString(PyExc_ValueError, "sizes that cannot be");
    }
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef queue_methods[] = {
    {"close", queue_close, METH_NOARGS, "End `work`, and let go of everything."},
    {"submit", queue_submit, METH_VARARGS, "Start a job; a small one is done then."},
    {"take", queue_take, METH_NOARGS, "Hand over what has ended."},
    {"work", queue_work, METH_NOARGS, "Copy until it is closed."},
    {0},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, "Jobs of copies between caches and an arena."},
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {0},
};

static PyType_Spec queue_spec = {
    .name = "kvstrata.transfers._row_queue.RowQueue",
    .basicsize = sizeof(Queue),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

static int add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &queue_spec, NULL);
    int result = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

    Py_XDECREF(type);
    return result;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_type}, {0}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstrata.transfers._row_queue",
    .m_doc = "Rows of caches to and from an arena.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__row_queue(void)
{
    return PyModuleDef_Init(&definition);
}
